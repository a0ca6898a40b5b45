"""What transformers' static layers do not check before they write: their ceiling, and that K and V fit.

Those layers keep their length in a tensor, so that a compiled step need not be compiled again for every length, and
find out that they are full only by an index error in the middle of a write.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import check_ceiling, refuse_geometry
from .buffer import row_signature


class StaticRoom:
    """How many tokens still fit into the static full-attention layers of a cache.

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
        held = int(layer.get_seq_length())
        check_ceiling(self.max_cache_len, held, new_tokens)
        self._surely_free = self.max_cache_len - held - new_tokens

    def check_announced(self, layer: Any, new_tokens: int) -> None:
        """The same for tokens whose mask is being made, before a step that may be compiled.

        Reading a length waits for the device. So it is read only when what was free at the last reading may have been
        used up by what was announced since.
        """
        if torch.compiler.is_compiling():
            return
        if new_tokens > self._surely_free:
            self.check(layer, new_tokens)
        else:
            self._surely_free -= new_tokens


def prepare_static(layer: Any, key_states: Tensor, value_states: Tensor) -> None:
    """Let a static layer allocate for first K and V, or raise if later ones do not fit to what it holds.

    It allocates outside inference mode, so that a cache filled in one mode can go on in another, and anew if it is
    empty and was made for another shape.
    """
    if torch.compiler.is_compiling():
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
        return
    if layer.is_initialized:
        expected = row_signature(layer.keys), row_signature(layer.values)
        got = row_signature(key_states), row_signature(value_states)
        if expected == got:
            return
        if int(layer.get_seq_length()) > 0:
            refuse_geometry(expected, got)
    with torch.inference_mode(False):
        layer.lazy_initialization(key_states, value_states)
