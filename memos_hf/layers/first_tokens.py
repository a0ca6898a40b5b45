"""Attention sinks: each row's first real tokens, which blocks keep exact beside their encoded selves."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..attention.lazy import Role
from ..attention.reference import Sinks
from .state import LayerState

# Where a row begins that has been nothing but padding so far.
UNKNOWN = -1
# Where a row begins whose first real tokens were sealed before it was known that they are.
MISSED = -2


class FirstTokens:
    """Where each row begins behind its padding, and exact copies of its first tokens from there on.

    Where rows begin is read off the mask that attention is given, which is before anything is sealed. Tensors are
    replaced, never written to: a fork's may be the same.

    Parameters
    ----------
    count : int
        Tokens to keep of each row.

    Attributes
    ----------
    is_known : bool
        Whether it is known of every row where it begins, or need not be.
    kept : Sinks, optional
        The copies; `None` before anything is sealed.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.is_known = count == 0
        self.kept: Sinks | None = None
        self._begins: Tensor | None = None  # int64 `[batch]`, or UNKNOWN or MISSED

    def note(self, mask: Tensor | None, batch: int, device: torch.device, sealed_tokens: int) -> None:
        """Find where each row begins, in the mask of the newest query; rows that were padding so far stay unknown."""
        if sealed_tokens and self._begins is None:
            self.is_known = True  # sealed before any mask was seen: the sinks are what they are
            return
        if mask is None or mask.ndim != 4:
            begins = torch.zeros(batch, dtype=torch.int64, device=device)
        else:
            visible = mask[:, 0, -1]
            if visible.dtype != torch.bool:
                visible = visible > torch.finfo(visible.dtype).min / 2
            begins = torch.where(visible.any(dim=-1), visible.int().argmax(dim=-1), UNKNOWN).expand(batch)
        if self._begins is not None:
            # What is sealed by now can no longer be copied exactly.
            begins = torch.where((begins >= 0) & (begins < sealed_tokens), MISSED, begins)
            begins = torch.where(self._begins != UNKNOWN, self._begins, begins)
        self._begins = begins.clone()
        self.is_known = bool((begins != UNKNOWN).all())
        if self.kept is not None:
            self.kept = replace(self.kept, positions=self._positions(batch, device))

    def _positions(self, batch: int, device: torch.device) -> Tensor:
        """int32 `[batch, count]`: each row's first real tokens, -1 where it has none yet."""
        begins = self._begins
        if begins is None:  # attention that shows no mask: taken as unpadded
            begins = torch.zeros(batch, dtype=torch.int64, device=device)
        positions = begins[:, None] + torch.arange(self.count, device=device)
        return torch.where(begins[:, None] < 0, -1, positions).int()

    def keep(self, keys: Tensor, values: Tensor, first: int) -> None:
        """Copy those that are among `keys` and `values`, `[batch, heads, tokens, head_dim]`, from token `first` on."""
        if self.count == 0:
            return
        batch, heads, tokens, _ = keys.shape
        if self.kept is None:
            zeros = [states.new_zeros(batch, heads, self.count, states.shape[3]) for states in (keys, values)]
            self.kept = Sinks(zeros[0], zeros[1], self._positions(batch, keys.device))
        at = self.kept.positions.long() - first
        here = ((at >= 0) & (at < tokens))[:, None, :, None]
        at = at.clamp(0, tokens - 1)[:, None, :, None]
        with torch.inference_mode(False):
            kept = [
                torch.where(here, states.gather(2, at.expand(-1, heads, -1, states.shape[3])), sinks)
                for sinks, states in ((self.kept.keys, keys), (self.kept.values, values))
            ]
            self.kept = Sinks(kept[0], kept[1], self.kept.positions)

    def put(self, states: Tensor, role: Role) -> None:
        """Write them over their decoded selves in `states`, `[batch, heads, tokens, head_dim]`, all that is sealed."""
        if self.kept is None:
            return
        exact = self.kept.keys if role == "key" else self.kept.values
        at = self.kept.positions.long()
        rows, sinks = ((at >= 0) & (at < states.shape[2])).nonzero(as_tuple=True)
        states[rows, :, at[rows, sinks]] = exact[rows, :, sinks]

    def forget(self) -> None:
        """Nothing is sealed any more: the tail has the tokens themselves."""
        self.kept = None

    def take_rows(self, index: Tensor) -> None:
        """Make row `i` of the batch what row `index[i]` was."""
        if self.kept is not None:
            with torch.inference_mode(False):
                self.kept = Sinks(self.kept.keys[index], self.kept.values[index], self.kept.positions[index])
        if self._begins is not None:
            self._begins = self._begins[index]

    @property
    def tensors(self) -> list[Tensor]:
        """Of the copies."""
        return [] if self.kept is None else [self.kept.keys, self.kept.values, self.kept.positions]

    @property
    def used_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def add_to(self, state: LayerState) -> None:
        """Put into `state` what is to be saved."""
        state.numbers["padding_noted"] = self.is_known
        names = "sink_keys", "sink_values", "sink_positions"
        state.tensors.update(zip(names, self.tensors, strict=False))
        if self._begins is not None:
            state.tensors["first_real"] = self._begins

    def check_state(self, state: LayerState) -> None:
        """Raise a `ValueError` if what is in `state`, beside a tail of K and V, cannot be taken."""
        keys, values = state.pair()
        batch, heads = keys.shape[:2]
        state.flag("padding_noted")
        if "sink_positions" in state.tensors:
            sinks = batch, heads, self.count
            state.check_tensor("sink_keys", (*sinks, keys.shape[3]), keys.dtype)
            state.check_tensor("sink_values", (*sinks, values.shape[3]), values.dtype)
            state.check_tensor("sink_positions", (batch, self.count), torch.int32)
        if "first_real" in state.tensors:
            state.check_tensor("first_real", (batch,), torch.int64)

    def take_state(self, state: LayerState, device: torch.device) -> None:
        """Hold what `add_to` put into `state`, copied to `device`."""
        self.is_known = state.flag("padding_noted")
        if "sink_positions" in state.tensors:
            names = ("sink_keys", "sink_values", "sink_positions")
            self.kept = Sinks(*(state.tensor(name).to(device, copy=True) for name in names))
        if "first_real" in state.tensors:
            self._begins = state.tensor("first_real").to(device, copy=True)
