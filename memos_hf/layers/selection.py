"""Which blocks matter to a query: bounds of their keys, by channel (Quest, arXiv:2406.10774)."""

from __future__ import annotations

import torch
from torch import Tensor


class KeyBounds:
    """The lowest and highest key of each block in each channel.

    Parameters
    ----------
    lowest, highest : Tensor
        `[batch, entries, heads, head_dim]`.
    """

    def __init__(self, lowest: Tensor, highest: Tensor) -> None:
        self.lowest, self.highest = lowest, highest

    @staticmethod
    def of(keys: Tensor, block_size: int) -> KeyBounds:
        """Bounds of whole blocks of keys, `[batch, heads, n * block_size, head_dim]`."""
        batch, heads, _, head_dim = keys.shape
        with torch.inference_mode(False), torch.no_grad():
            blocks = keys.detach().reshape(batch, heads, -1, block_size, head_dim).transpose(1, 2)
            return KeyBounds(blocks.amin(dim=3), blocks.amax(dim=3))

    @staticmethod
    def of_entries(keys: Tensor, entry_tokens: list[int]) -> KeyBounds:
        """Bounds of entries of so many tokens each of keys, `[batch, heads, tokens, head_dim]`."""
        with torch.inference_mode(False), torch.no_grad():
            entries = torch.split(keys.detach(), entry_tokens, dim=2)
            return KeyBounds(
                torch.stack([states.amin(dim=2) for states in entries], dim=1),
                torch.stack([states.amax(dim=2) for states in entries], dim=1),
            )

    @property
    def tensors(self) -> list[Tensor]:
        """What is held."""
        return [self.lowest, self.highest]

    def followed_by(self, other: KeyBounds) -> KeyBounds:
        """The bounds of these entries and, behind them, of those."""
        with torch.inference_mode(False):
            return KeyBounds(
                torch.cat([self.lowest, other.lowest], dim=1), torch.cat([self.highest, other.highest], dim=1)
            )

    def first(self, entries: int) -> KeyBounds | None:
        """The bounds of the first `entries`."""
        return KeyBounds(self.lowest[:, :entries], self.highest[:, :entries]) if entries else None

    def rows(self, index: Tensor) -> KeyBounds:
        """The bounds of the rows `index`."""
        with torch.inference_mode(False):
            return KeyBounds(self.lowest[index], self.highest[index])

    def select(self, query: Tensor, mask: Tensor | None, entry_tokens: list[int], count: int) -> list[list[int]]:
        """The entries of each row that matter most.

        Ranked by an upper bound of query · key, the largest over all heads and queries. A row's first entry that may be
        seen is always among them: it holds the tokens that attention sinks into.

        Parameters
        ----------
        query : Tensor
            `[batch, heads, queries, head_dim]`.
        mask : Tensor, optional
            `[batch or 1, heads or 1, queries, tokens]`; an entry of which nothing may be seen comes last.
        entry_tokens : list of int
            Tokens of each entry.
        count : int
            How many to select.

        Returns
        -------
        list[list[int]]
            Of each row, `count` entries in their order.
        """
        batch, _, kv_heads, head_dim = self.lowest.shape
        with torch.no_grad():
            rows = query.detach().float().reshape(batch, kv_heads, -1, head_dim)
            bound = rows.clamp(min=0) @ self.highest.float().permute(0, 2, 3, 1)
            bound += rows.clamp(max=0) @ self.lowest.float().permute(0, 2, 3, 1)
            rank = bound.amax(dim=(1, 2))  # [batch, entries]
            seen = torch.ones_like(rank, dtype=torch.bool) if mask is None else _seen(mask, entry_tokens)
            rank = rank.masked_fill(~seen, -torch.inf)
            rank.scatter_(1, seen.int().argmax(dim=1, keepdim=True).expand(batch, 1), torch.inf)
            chosen: list[list[int]] = rank.topk(count, dim=1).indices.sort(dim=1).values.tolist()
        return chosen


def _seen(mask: Tensor, entry_tokens: list[int]) -> Tensor:
    """Boolean `[batch or 1, entries]`: whether any query may see a token of the entry."""
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    tokens = allowed.flatten(1, 2).any(dim=1)[:, : sum(entry_tokens)].int()
    entry = torch.arange(len(entry_tokens), device=mask.device).repeat_interleave(
        torch.tensor(entry_tokens, device=mask.device)
    )
    found = tokens.new_zeros(tokens.shape[0], len(entry_tokens))
    return found.index_add_(1, entry, tokens) > 0
