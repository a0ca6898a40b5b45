"""Full attention: one contiguous buffer, all of it visible."""

from __future__ import annotations

from torch import Tensor

from ..config import CacheOptions
from .base import BufferedLayer, removed_tokens


class ContiguousLayer(BufferedLayer):
    """Every token of the sequence, in one preallocated buffer per K and V."""

    def __init__(self, options: CacheOptions) -> None:
        super().__init__(options, options.first_capacity)

    @property
    def growth_limit(self) -> int | None:
        """The ceiling in tokens, if there is one."""
        return self.options.max_cache_len

    def append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Append K and V; return views of all valid tokens."""
        self.buffer.append(key_states, value_states, self.growth_limit)
        return self.buffer.view()

    def get_seq_length(self) -> int:
        """Tokens cached."""
        return self.buffer.length

    def get_max_length(self) -> int:
        """The ceiling in tokens; -1 without one."""
        return self.options.max_cache_len or -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of what the next update of `query_length` tokens returns, and the position of its first token."""
        return self.buffer.length + query_length, 0

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise if `crop` would."""
        removed_tokens(tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens: the pointer moves, nothing is copied."""
        self.buffer.remove_last(removed_tokens(tokens_to_remove))
