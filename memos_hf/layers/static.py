"""The ceiling of a static cache, checked before transformers' static layers write.

Those layers keep their length in a tensor, so that a compiled step need not be compiled again for every length, and
find out that they are full only by an index error in the middle of a write.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StaticRoom:
    """How many tokens still fit into the static full-attention layers of a cache.

    Reading a length tensor waits for the device, so it is read only when the tokens that were free at the last
    reading may have been used up.

    Parameters
    ----------
    max_cache_len : int
        The ceiling in tokens.
    """

    def __init__(self, max_cache_len: int) -> None:
        self.max_cache_len = max_cache_len
        self._surely_free = 0

    def check(self, layer: Any, new_tokens: int) -> None:
        """Raise if `new_tokens` do not fit into `layer`, one of transformers' static layers."""
        if torch.compiler.is_compiling():
            # The graph itself has to refuse. It waits for nothing on a CPU; on a GPU this is a device-side assertion.
            fits = layer.cumulative_length + new_tokens <= self.max_cache_len
            torch._assert_async(fits, f"max_cache_len: the static cache may hold {self.max_cache_len} tokens")
            return
        if new_tokens > self._surely_free:
            held = int(layer.get_seq_length())
            if held + new_tokens > self.max_cache_len:
                raise ValueError(
                    f"max_cache_len: the cache may hold {self.max_cache_len} tokens, it holds {held} and "
                    f"{new_tokens} more came; nothing was stored"
                )
            self._surely_free = self.max_cache_len - held
        self._surely_free -= new_tokens


def initialise_static(layer: Any, key_states: Tensor, value_states: Tensor) -> None:
    """Let a static layer allocate outside inference mode, so that a cache filled in one mode can go on in another."""
    if layer.is_initialized:
        return
    if torch.compiler.is_compiling():
        layer.lazy_initialization(key_states, value_states)
    else:
        with torch.inference_mode(False):
            layer.lazy_initialization(key_states, value_states)
