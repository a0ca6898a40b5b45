"""Sliding and chunked attention: what every layer with a window does, and a buffer of twice the window."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from ..config import CacheOptions
from .base import BufferedLayer, removed_tokens
from .state import LayerState


class WindowedLayer(BufferedLayer):
    """The last `sliding_window - 1` tokens, which with the new one make a window.

    What is returned and what `get_mask_sizes` announces is what transformers' `DynamicSlidingWindowLayer` does.
    Subclasses say how the tokens are stored.

    Parameters
    ----------
    sliding_window : int
        Tokens in a window (or chunk), the query's own included.
    *storage
        What the class that stores the tokens takes.
    """

    is_sliding = True

    def __init__(self, sliding_window: int, *storage: Any) -> None:
        super().__init__(*storage)
        self.sliding_window = sliding_window
        self.cumulative_length = 0
        # While true, tokens are kept beyond the window until `crop` says how many were accepted. `generate` sets it.
        self.record_past = False
        # Read by `DynamicCache.__iter__`, which DataParallel gathers.
        self._sliding_window_tensor = torch.tensor(sliding_window, dtype=torch.long)

    def activate_past_recording(self) -> None:
        """Keep all tokens until the next `crop`, so that it can roll back past the window (assisted decoding)."""
        self.record_past = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for K and V of these shapes, dtypes and device."""
        kept = key_states.shape[2] if self.record_past else min(key_states.shape[2], self.sliding_window)
        super().lazy_initialization(key_states[:, :, :kept], value_states[:, :, :kept])
        self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)

    def append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Append K and V; return up to `sliding_window - 1` earlier tokens and the new ones."""
        count = key_states.shape[2]
        if count >= self.sliding_window and not self.record_past:
            states = self._replace(key_states, value_states)
        else:
            states = self._append(key_states, value_states)
        self.cumulative_length += count
        return states

    @abstractmethod
    def _append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """`append` of tokens that do not fill a window by themselves, or that are all kept."""

    def _replace(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Take tokens that fill a window by themselves: return them behind the old ones, keep the newest."""
        states = key_states, value_states
        if self.held_tokens > 0:
            old_keys, old_values = self.lent(last=self.sliding_window - 1)
            states = torch.cat([old_keys, key_states], dim=2), torch.cat([old_values, value_states], dim=2)
        first_kept = key_states.shape[2] - (self.sliding_window - 1)
        self._hold_only(key_states[:, :, first_kept:], value_states[:, :, first_kept:])
        return states

    def _hold_only(self, key_states: Tensor, value_states: Tensor) -> None:
        """Hold these tokens instead of those that are held."""
        self.buffer.replace(key_states, value_states, self.growth_limit)

    def get_seq_length(self) -> int:
        """Tokens seen, those that left the window included."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """The window, as transformers' sliding layers say."""
        return self.sliding_window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of what the next update of `query_length` tokens returns, and the position of its first token."""
        kept = min(self.cumulative_length, self.sliding_window - 1)
        return kept + query_length, self.cumulative_length - kept

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise if `crop` would: the window that was current before the removed tokens must still be here."""
        removed = removed_tokens(tokens_to_remove)
        if self.cumulative_length < self.sliding_window:
            return
        if not self.record_past:
            raise RuntimeError(
                "crop: the window is full and earlier tokens were dropped; call activate_past_recording before "
                "the tokens to be removed come"
            )
        remaining = max(self.cumulative_length - removed, 0)
        if self.held_tokens - removed < min(remaining, self.sliding_window - 1):
            raise RuntimeError(
                f"crop: removing {removed} tokens needs tokens that were dropped before recording began "
                f"(held: {self.held_tokens}, window: {self.sliding_window})"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens and what lies beyond the window before them."""
        self.check_crop(tokens_to_remove)
        removed = removed_tokens(tokens_to_remove)
        self._remove_last(removed)
        self.cumulative_length = max(self.cumulative_length - removed, 0)
        self._keep_window()

    @abstractmethod
    def _remove_last(self, tokens: int) -> None:
        """Forget the last `tokens`, or all if there are fewer."""

    @abstractmethod
    def _keep_window(self) -> None:
        """Forget all but the last `sliding_window - 1` tokens."""

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.cumulative_length = 0

    def state(self) -> LayerState:
        """All that is held, to be saved, and how many tokens were seen."""
        state = super().state()
        state.numbers.update(
            sliding_window=self.sliding_window,
            cumulative_length=self.cumulative_length,
            record_past=self.record_past,
        )
        return state

    def check_state(self, state: LayerState) -> None:
        """Raise if this layer, which is empty, cannot take `state`."""
        super().check_state(state)
        if state.count("sliding_window") != self.sliding_window:
            raise ValueError(f"sliding_window: expected {self.sliding_window}, got {state.numbers['sliding_window']}")
        self.check_room(state.count("cumulative_length"))
        state.flag("record_past")

    def take_state(self, state: LayerState, device: torch.device) -> None:
        """Hold what `state` has, copied to `device`."""
        self.record_past = state.flag("record_past")
        super().take_state(state, device)
        self.cumulative_length = state.count("cumulative_length")


class SlidingLayer(WindowedLayer):
    """A window in a buffer of twice its length.

    ::

        [ dropped ....... | window - 1 valid | room ]   append in place, the valid part slides to the right
        [ window - 1 valid | room .................. ]   at the end it is copied to the front, once a window

    So there is no roll and no concatenation, and a token's cost does not depend on the window.

    Parameters
    ----------
    options : CacheOptions
    sliding_window : int
        Tokens in a window (or chunk), the query's own included.
    """

    def __init__(self, options: CacheOptions, sliding_window: int) -> None:
        super().__init__(sliding_window, options, min(options.first_capacity, 2 * sliding_window))

    @property
    def growth_limit(self) -> int | None:
        """Twice the window, where tokens beyond it are not recorded."""
        return None if self.record_past else 2 * self.sliding_window

    def _append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        visible = min(self.buffer.length, self.sliding_window - 1) + key_states.shape[2]
        self.buffer.append(key_states, value_states, self.growth_limit)
        states = self.buffer.view(last=visible)
        if not self.record_past:
            self._keep_window()
        return states

    def _remove_last(self, tokens: int) -> None:
        self.buffer.remove_last(tokens)

    def _keep_window(self) -> None:
        self.buffer.keep_last(self.sliding_window - 1)
