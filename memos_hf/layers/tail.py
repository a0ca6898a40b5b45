"""The open tail of rows that began as one: what they have in common is held once."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from .buffer import KVBuffer


class TailBuffer(KVBuffer):
    """A buffer whose first tokens all rows may have in common.

    ::

        all rows  [ common ........ ]
        row 0                       [ own ... ]
        row 1                       [ own ... ]

    They are what the one row of a batch had when it was repeated, as for several samples from one prompt. They never
    change. `tensors`, `capacity`, `start` and `end` are those of the rows' own tokens; `length`, `view` and what
    forgets tokens are about all of them.
    """

    def __init__(self, first_capacity: int, growth_factor: float, seq_major: bool = False):
        super().__init__(first_capacity, growth_factor, seq_major)
        self._common: tuple[Tensor, Tensor] | None = None  # `[1, heads, tokens, head_dim]`
        self._common_is_lent = False  # whether others may hold it too

    @property
    def common_tokens(self) -> int:
        """Tokens that all rows have in common, and hold once."""
        return 0 if self._common is None else self._common[0].shape[2]

    @property
    def common_bytes(self) -> int:
        """Their bytes."""
        return 0 if self._common is None else sum(half.numel() * half.element_size() for half in self._common)

    @property
    def length(self) -> int:
        """Valid tokens of each row."""
        return self.common_tokens + super().length

    @property
    def valid_bytes(self) -> int:
        """Bytes of the valid tokens, those in common once."""
        return self.common_bytes + super().valid_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of the valid tokens that somebody else may hold too."""
        own = super().valid_bytes if self.shared else 0
        return own + (self.common_bytes if self._common_is_lent else 0)

    @property
    def held_tensors(self) -> list[Tensor]:
        """Every tensor."""
        return [*super().held_tensors, *(self._common or ())]

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """K and V without a copy: of what rows have in common, where there is any, and of their own."""
        return [self._common_of_all_rows(), self._own()] if self._common is not None else [self._own()]

    def first(self, tokens: int) -> tuple[Tensor, Tensor]:
        """K and V of the first `tokens`: of one row where all have them in common, of all rows otherwise."""
        keys, values = self._common if self._common is not None and tokens <= self.common_tokens else self.view()
        return keys[:, :, :tokens], values[:, :, :tokens]

    def view(self, last: int | None = None) -> tuple[Tensor, Tensor]:
        """The valid K and V, or the `last` tokens of them; a copy where rows have some of them in common."""
        if self._common is None or (last is not None and last <= super().length):
            return super().view(last)
        before = 0 if last is None else max(self.length - last, 0)
        keys, values = (
            torch.cat([common[:, :, before:], own], dim=2)
            for common, own in zip(self._common_of_all_rows(), self._own(), strict=True)
        )
        return keys, values

    def halves(self) -> tuple[Tensor | None, Tensor | None]:
        """What is valid of K and of V."""
        return super().halves() if self._common is None else self.view()

    def _common_of_all_rows(self) -> tuple[Tensor, Tensor]:
        assert self._common is not None
        keys, values = (half.expand(self.tensors[0].shape[0], -1, -1, -1) for half in self._common)
        return keys, values

    def take_rows(self, index: Tensor) -> None:
        """Make row `i` of the batch what row `index[i]` was; several that were one have its tokens in common."""
        if self.tensors[0].shape[0] > 1 or index.shape[0] <= 1 or self.is_recorded(*self.tensors):
            super().take_rows(index)
            return
        is_lent = self.shared or self._common_is_lent
        with torch.inference_mode(False), torch.no_grad():
            keys, values = (half.detach() for half in self.view())
        room = [self._empty(half, self.first_capacity, batch=index.shape[0]) for half in (keys, values)]
        self._install(room[0], room[1], 0)  # beside the tensors that were, in which `keys` and `values` stay
        self._common, self._common_is_lent = (keys, values), is_lent

    def keep_last(self, tokens: int) -> None:
        """Forget all but the last `tokens`."""
        own = super().length
        if self._common is not None and tokens < self.length:
            # In memory of its own: the tensors may have been much larger.
            with torch.inference_mode(False):
                left = [half[:, :, half.shape[2] - (tokens - own) :].clone() for half in self._common if tokens > own]
            self._common = (left[0], left[1]) if left else None
            self._common_is_lent = False
        super().keep_last(tokens)

    def remove_last(self, tokens: int) -> None:
        """Forget the last `tokens`, or all if there are fewer."""
        of_common = tokens - super().length
        super().remove_last(tokens)
        if self._common is not None and of_common > 0:
            left = self.common_tokens - of_common
            keys, values = self._common
            self._common = (keys[:, :, :left], values[:, :, :left]) if left > 0 else None

    def allocate(self, keys: Tensor, values: Tensor, limit: int | None = None) -> None:
        """Make room for first tokens like `keys` and `values`; nothing is written."""
        self._common = None
        super().allocate(keys, values, limit)

    def adopt(self, keys: Tensor | None, values: Tensor | None) -> None:
        """Take tensors that somebody else may hold, as they are; every token of them is valid."""
        self._common = None
        super().adopt(keys, values)

    def free(self) -> None:
        """Drop the tensors."""
        self._common = None
        super().free()

    def clear(self) -> None:
        """Forget all tokens; the memory of the rows' own stays."""
        self._common = None
        super().clear()

    def fork(self) -> TailBuffer:
        """A buffer that holds the same tensors. Whichever of the two is written to first takes a copy."""
        self._common_is_lent = self._common is not None
        return super().fork()

    def move_to(self, device: torch.device) -> None:
        """Move the valid part to another device."""
        super().move_to(device)
        if self._common is not None:
            with torch.inference_mode(False):
                self._common = self._common[0].to(device), self._common[1].to(device)

    def __deepcopy__(self, memo: dict[int, Any]) -> KVBuffer:
        twin = super().__deepcopy__(memo)
        assert isinstance(twin, TailBuffer)
        twin._common = copy.deepcopy(self._common, memo)
        return twin
