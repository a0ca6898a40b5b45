"""Full attention: one contiguous buffer, all of it visible."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import cpu, interface
from ..attention.dispatch import attend_in_place
from ..attention.lazy import Role, stand_in
from ..attention.reference import Exact
from ..config import CacheOptions
from .base import BufferedLayer, removed_tokens

# Below so many tokens the stock kernel is as fast as ours.
SHORTEST_FUSED = 256


class ContiguousLayer(BufferedLayer):
    """Every token of the sequence, in one preallocated buffer per K and V."""

    def __init__(self, options: CacheOptions) -> None:
        super().__init__(options, options.first_capacity)
        self.fused_calls = 0

    @property
    def growth_limit(self) -> int | None:
        """The ceiling in tokens, if there is one."""
        return self.options.max_cache_len

    def append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Append K and V; return views of all valid tokens, or what stands for them if attention is to be fused."""
        self.buffer.append(key_states, value_states, self.growth_limit)
        keys, values = self.buffer.view()
        if not self.options.fused_attention or not self._can_be_fused(key_states, keys, values):
            return keys, values
        reading = _Views(self, keys, values)
        return stand_in(reading, "key", keys.dtype, keys.device), stand_in(
            reading, "value", values.dtype, values.device
        )

    def _can_be_fused(self, key_states: Tensor, keys: Tensor, values: Tensor) -> bool:
        return (
            key_states.shape[2] == 1
            and self.options.attention != interface.FLEX
            and self.buffer.length >= SHORTEST_FUSED
            and not torch.compiler.is_compiling()
            and not (keys.requires_grad or values.requires_grad)
            and keys.device.type == "cpu"
            and cpu.supports(keys, keys, values)
            and cpu.available()
        )

    def get_seq_length(self) -> int:
        """Tokens cached."""
        return self.buffer.length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens: the pointer moves, nothing is copied."""
        self.buffer.remove_last(removed_tokens(tokens_to_remove))


class _Views:
    """What the stand-ins of one update read: views of the buffer as they would have been returned."""

    def __init__(self, layer: ContiguousLayer, keys: Tensor, values: Tensor) -> None:
        self.layer, self.exact = layer, Exact(keys, values)
        self.follows_scores = layer.options.attention == interface.NAME

    def shape(self, role: Role) -> tuple[int, int, int, int]:
        batch, heads, tokens, head_dim = self.decode(role).shape
        return batch, heads, tokens, head_dim

    def decode(self, role: Role) -> Tensor:
        return self.exact.keys if role == "key" else self.exact.values

    def attend(
        self,
        query: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
        softcap: float = 0.0,
        head_sinks: Tensor | None = None,
    ) -> Tensor | None:
        tokens = self.exact.keys.shape[2]
        output = attend_in_place(query, self.exact, None, None, tokens, mask, causal, scale, softcap, head_sinks)
        self.layer.fused_calls += output is not None
        return output
