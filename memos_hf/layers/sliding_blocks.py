"""Sliding and chunked attention over sealed blocks, which are released when the window has left them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import UNENCODED, CacheOptions, KVQuantizationConfig
from .blocks import BlockLayer
from .sliding import WindowedLayer
from .state import LayerState


class SlidingBlockLayer(WindowedLayer, BlockLayer):
    """A window whose older tokens are in sealed blocks.

    ::

        tokens ->     | 4096 ... 4223 | 4224 ... 4351 | 4352 ... 4479 | 4480 ....... 4700
        each row      [ sealed:       |  sealed       |  sealed       |  tail ......... ]
        window - 1            [ 4170 ........................................... 4700 ]
                        hidden ^

    Of the oldest block a part may have left the window. It is hidden: nobody reads it, and the block is released at
    the update that finds none of it in the window. A token that has left the window before it was sealed is never
    encoded. Nor is anything sealed while tokens beyond the window are recorded: they are exact, and most go at the
    `crop` that ends the recording. There are no sinks, as a window loses a row's first tokens.

    Parameters
    ----------
    options : CacheOptions
    quantization : KVQuantizationConfig
        How blocks are encoded.
    sliding_window : int
        Tokens in a window (or chunk), the query's own included; more than the residual window and a block, or nothing
        would ever be sealed.

    Raises
    ------
    ValueError
        If the window is too short.
    """

    def __init__(self, options: CacheOptions, quantization: KVQuantizationConfig, sliding_window: int) -> None:
        super().__init__(sliding_window, options, quantization)
        if not self.seals_any(options, quantization, sliding_window):
            raise ValueError(
                f"sliding_window: expected more than {self.residual + self.block_size} tokens, the residual window "
                f"and a block, got {sliding_window}"
            )

    @staticmethod
    def seals_any(options: CacheOptions, quantization: KVQuantizationConfig, sliding_window: int) -> bool:
        """Whether a window is so long that some of its tokens can lie in a sealed block."""
        return sliding_window > quantization.residual_window(options.block_size) + options.block_size

    def _forget_blocks(self) -> None:
        super()._forget_blocks()
        self._hidden = 0  # tokens before the window, of the first block and, until the next update, behind it

    @property
    def sink_tokens(self) -> int:
        """0: a row's first tokens leave the window."""
        return 0

    @property
    def most_entries(self) -> int:
        """Blocks of a row at most, where none was shortened and nothing beyond the window is recorded."""
        return (self.sliding_window + self.block_size - 2 - self.residual) // self.block_size

    @property
    def held_tokens(self) -> int:
        """Tokens of each row that are held: a window less one, or more while the past is recorded."""
        return super().held_tokens - self._hidden

    def _append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        self._release_hidden()
        self.seal()
        self.version += 1
        visible = min(self.held_tokens, self.sliding_window - 1) + key_states.shape[2]
        self.buffer.append(key_states, value_states)
        # As long as no block is visible, plain views are.
        states = (
            self.buffer.view(visible)
            if visible <= self.buffer.length
            else self._stand_ins(visible, key_states.shape[2])
        )
        if not self.record_past:
            self._keep_window()
        return states

    def _replace(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        self.materialised_calls += bool(self._entry_tokens)
        return super()._replace(key_states, value_states)

    def _hold_only(self, key_states: Tensor, value_states: Tensor) -> None:
        super()._hold_only(key_states, value_states)
        self.version += 1
        self._release_rows(self._table)
        self._forget_blocks()

    @property
    def due_blocks(self) -> int:
        """Whole blocks of the tail beside the residual window; 0 while tokens beyond the window are recorded."""
        return 0 if self.held_tokens >= self.sliding_window else super().due_blocks

    def seal(self) -> None:
        """Encode the blocks that are due.

        Where that lets go of tokens that left the window, what the last update returned does not hold any longer.
        """
        if self.due_blocks > 0:
            self._release_hidden()
            super().seal()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens and what lies beyond the window before them."""
        super().crop(tokens_to_remove)
        self._release_hidden()

    @property
    def saved_as(self) -> str:
        """The kind of layer that files say this one is."""
        return "SlidingLayer" if self.quantization is UNENCODED else "SlidingBlockLayer"

    def state(self) -> LayerState:
        """All that is held, to be saved, hidden tokens of a visible block among it."""
        state = super().state()
        if self.quantization is not UNENCODED:
            state.numbers["hidden"] = self._hidden
        return state

    def check_state(self, state: LayerState) -> None:
        """Raise if this layer, which is empty, cannot take `state`."""
        super().check_state(state)
        if self.quantization is UNENCODED:
            return
        held = sum(state.numbers.get("entry_tokens", ())) + (state.pair()[0].shape[2] if state.tensors else 0)
        if state.count("hidden") > held:
            raise ValueError(f"hidden: expected at most the {held} tokens that are held, got {state.numbers['hidden']}")

    def take_state(self, state: LayerState, device: torch.device) -> None:
        """Hold what `state` has, copied to `device`."""
        super().take_state(state, device)
        if self.quantization is not UNENCODED:
            self._hidden = state.count("hidden")

    def _remove_last(self, tokens: int) -> None:
        BlockLayer.crop(self, -min(tokens, self.held_tokens))

    def _keep_window(self) -> None:
        self._hidden += max(self.held_tokens - (self.sliding_window - 1), 0)
        if not self._entry_tokens:  # nobody reads the tail but through views
            self._release_hidden()

    def _release_hidden(self) -> None:
        """Let go of the blocks that are hidden as a whole and, if all are, of the hidden part of the tail."""
        if self._hidden == 0:
            return
        gone = 0
        for tokens in self._entry_tokens:
            if tokens > self._hidden:
                break
            self._hidden -= tokens
            gone += 1
        if gone:
            self.version += 1
            self._keep_entries(gone, self._entry_tokens[gone:])
        if not self._entry_tokens:
            self.buffer.keep_last(self.buffer.length - self._hidden)
            self._hidden = 0
