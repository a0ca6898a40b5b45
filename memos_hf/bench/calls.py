"""Calls of the decode-attention operator with random contents, of given or random sizes."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..attention import reference
from ..attention.op import decode_attention
from ..attention.reference import Exact, Sealed, Sinks
from ..blocks.codecs import BlockCodec, CodecSpec, Role


@dataclass(frozen=True)
class Geometry:
    """The sizes of one call.

    Attributes
    ----------
    batch, kv_heads, group, queries : int
        Rows, heads of keys and values, query heads for each, queries of a head.
    head_dim, block : int
        Channels of a head, tokens of a block.
    entries, tail, sinks : int
        Of each row: sealed blocks, exact tokens behind them, exact tokens among the sealed ones.
    dtype : torch.dtype
        Of queries and of everything exact.
    """

    batch: int
    kv_heads: int
    group: int
    queries: int = 1
    head_dim: int = 128
    block: int = 128
    entries: int = 4
    tail: int = 129
    sinks: int = 4
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def drawn(cls, draw: random.Random) -> Geometry:
        """Random sizes, such as models have, with few tokens."""
        return cls(
            batch=draw.randint(1, 3),
            kv_heads=draw.choice((1, 2, 3, 8)),
            group=draw.choice((1, 2, 3, 4, 7, 8)),
            queries=draw.choice((1, 1, 2, 5)),
            head_dim=draw.choice((64, 80, 96, 128, 256)),
            block=draw.choice((16, 32, 64, 128)),
            entries=draw.choice((0, 1, 2, 5, 9)),
            tail=draw.randint(1, 200),
            sinks=draw.randint(0, 5),
            dtype=draw.choice((torch.float32, torch.float16, torch.bfloat16)),
        )


@dataclass(frozen=True)
class Call:
    """Arguments of the operator; see :func:`memos_hf.attention.reference.decode_attention`."""

    query: Tensor
    tail: Exact
    sealed: Sealed | None
    sinks: Sinks | None
    mask: Tensor | None = None
    softcap: float = 0.0
    head_sinks: Tensor | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """In their order."""
        scale = self.query.shape[-1] ** -0.5
        return self.query, self.tail, self.sealed, self.sinks, self.mask, scale, self.softcap, self.head_sinks

    def run(self) -> Tensor:
        """Attention by the operator, `[batch, heads, queries, head_dim]`."""
        return decode_attention(*self.arguments)

    def error(self) -> float:
        """Largest error of the operator beside float64, in units of the largest output."""
        expected = reference.decode_attention(*replace(self, query=self.query.double()).arguments)
        # A NaN compares as an error, not as none.
        difference = (self.run().double() - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
        return float(difference.nan_to_num(nan=torch.inf))

    def __str__(self) -> str:
        """The sizes, for who wants to make the same call."""
        batch, heads, queries, head_dim = self.query.shape
        words = [f"{batch} x {heads}/{self.tail.keys.shape[1]} heads of {head_dim}, {queries} queries"]
        if self.sealed is not None:
            words.append(f"{self.sealed.table.shape[1]} blocks of {self.sealed.key_codec.block_size}")
            words.append(f"{int(self.sealed.starts[0, -1])} tokens in them")
        words.append(f"tail {self.tail.keys.shape[2]}")
        words += [f"{self.sinks.positions.shape[1]} sinks"] if self.sinks is not None else []
        words += [f"{self.mask.dtype} mask {list(self.mask.shape)}"] if self.mask is not None else []
        words += [f"softcap {self.softcap:g}"] if self.softcap else []
        words += ["head sinks"] if self.head_sinks is not None else []
        return ", ".join(words)

    def bytes_read(self) -> int:
        """Bytes of keys and values, encoded or not, that one call has to read."""
        tensors = [self.tail.keys, self.tail.values]
        if self.sinks is not None:
            tensors += [self.sinks.keys, self.sinks.values]
        if self.sealed is not None:
            tensors += [*self.sealed.keys.values(), *self.sealed.values.values()]
        return sum(tensor.nbytes for tensor in tensors)


class RandomCalls:
    """Makes calls with normally distributed keys, values and queries, encoded as asked.

    Parameters
    ----------
    device : torch.device
    seed : int
    """

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device, self._draw = device, random.Random(seed)
        self._generator = torch.Generator(device).manual_seed(seed)

    def plain(self, sizes: Geometry, specs: tuple[str, str]) -> Call:
        """A call as decoding makes it: a batch whose rows have seen all their tokens, without a mask."""
        heads = sizes.kv_heads * sizes.group
        query = self._normal(sizes, heads, sizes.queries)
        # As in a cache, the tail is a view into a larger buffer.
        tail = (self._normal(sizes, sizes.kv_heads, sizes.tail + 7)[:, :, : sizes.tail] for _ in range(2))
        sealed = self._sealed(sizes, specs) if sizes.entries else None
        sinks = None
        if sealed is not None and sizes.sinks:
            positions = torch.arange(sizes.sinks, dtype=torch.int32, device=self.device).repeat(sizes.batch, 1)
            keys, values = (self._normal(sizes, sizes.kv_heads, sizes.sinks) for _ in range(2))
            sinks = Sinks(keys, values, positions)
        return Call(query, Exact(*tail), sealed, sinks)

    def drawn(self, specs: tuple[str, str]) -> Call:
        """A call of random sizes, with one or another of what models and caches may add."""
        sizes, draw = Geometry.drawn(self._draw), self._draw
        call = self.plain(sizes, specs)
        if call.sealed is not None and draw.random() < 0.5:  # as a crop into a block leaves it
            lengths = torch.full((sizes.entries,), sizes.block, dtype=torch.int32)
            lengths[draw.randrange(sizes.entries)] = draw.randint(1, sizes.block)
            starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int().repeat(sizes.batch, 1)
            call = replace(call, sealed=replace(call.sealed, starts=starts.to(self.device)))
        tokens = sizes.tail + (int(call.sealed.starts[0, -1]) if call.sealed is not None else 0)
        heads = sizes.kv_heads * sizes.group
        head_sinks = torch.randn(heads, generator=self._generator, device=self.device) if draw.random() < 0.3 else None
        return replace(
            call,
            mask=self._mask(sizes, draw.choice((1, heads)), tokens, draw.choice(("none", "boolean", "additive"))),
            softcap=draw.choice((0.0, 0.0, 20.0)),
            head_sinks=head_sinks,
        )

    def _mask(self, sizes: Geometry, heads: int, tokens: int, kind: str) -> Tensor | None:
        shape = (sizes.batch, heads, sizes.queries, tokens)
        if kind == "boolean":
            mask = torch.rand(shape, generator=self._generator, device=self.device) < 0.8
            mask[..., -1] = True
            return mask
        if kind == "additive":
            return torch.randn(shape, generator=self._generator, device=self.device, dtype=sizes.dtype)
        return None

    def _sealed(self, sizes: Geometry, specs: tuple[str, str]) -> Sealed:
        """Blocks of all rows at scattered slots, as those of a cache that has been used for a while."""
        slots = sizes.batch * sizes.entries
        key_codec, keys = self._encoded(specs[0], "key", slots, sizes)
        value_codec, values = self._encoded(specs[1], "value", slots, sizes)
        table = torch.randperm(slots, generator=self._generator, device=self.device).int()
        starts = torch.arange(sizes.entries + 1, device=self.device, dtype=torch.int32) * sizes.block
        table, starts = table.view(sizes.batch, sizes.entries), starts.repeat(sizes.batch, 1)
        return Sealed(key_codec, value_codec, keys, values, table, starts)

    def _encoded(self, spec: str, role: Role, slots: int, sizes: Geometry) -> tuple[BlockCodec, dict[str, Tensor]]:
        fitted = CodecSpec.parse(spec).fitted_to(sizes.head_dim, sizes.block)
        codec = BlockCodec(fitted, role, sizes.head_dim, sizes.block, sizes.dtype)
        shape = (slots, sizes.kv_heads, sizes.block, sizes.head_dim)
        states = torch.randn(shape, generator=self._generator, device=self.device, dtype=sizes.dtype)
        return codec, codec.encode(states)[0]

    def _normal(self, sizes: Geometry, heads: int, tokens: int) -> Tensor:
        shape = (sizes.batch, heads, tokens, sizes.head_dim)
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=sizes.dtype)
