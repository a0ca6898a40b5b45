"""Random cases of decode attention, and a naive computation to check kernels against."""

import math

import torch

from memos_hf.attention.reference import Exact, Sealed, Sinks
from memos_hf.blocks.codecs import BlockCodec, CodecSpec

CODECS = [
    ("full", "full"),
    ("int8 token", "int8 token"),
    ("int8 channel 8", "int8 token 8"),
    ("int8 tensor", "int8 tensor"),
    ("fp8 token", "fp8 token"),
    ("int4 channel 8 hadamard", "int4 token hadamard symmetric"),
    ("int4 token 8 hadamard symmetric", "int4 token 8"),
    ("int2 channel 8", "int2 token 8 hadamard"),
]


class Case:
    """Random queries and cached tokens."""

    def __init__(
        self,
        codecs=("int8 token", "int8 token"),
        batch=2,
        kv_heads=2,
        group=2,
        queries=1,
        key_dim=16,
        value_dim=16,
        block=16,
        entries=3,
        tail=11,
        sinks=2,
        dtype=torch.float32,
        seed=0,
        shortened=True,
        hidden=0,
    ):
        self.random = torch.Generator().manual_seed(seed)
        self.batch, self.heads, self.queries = batch, kv_heads * group, queries
        self.query = self.normal(batch, self.heads, queries, key_dim).to(dtype)
        # Views into larger buffers, as a cache's tail is.
        self.tail = Exact(
            self.normal(batch, kv_heads, tail + 5, key_dim).to(dtype)[:, :, :tail],
            self.normal(batch, kv_heads, tail + 5, value_dim).to(dtype)[:, :, :tail],
        )
        self.sealed = self.seal(codecs, kv_heads, key_dim, value_dim, block, entries, dtype, shortened)
        if self.sealed and hidden:
            # Leave as many as there are sinks, which lie at different positions.
            self.sealed.starts.sub_(min(hidden, int(self.sealed.starts[0, -1]) - sinks))
        sealed_tokens = int(self.sealed.starts[0, -1]) if self.sealed else 0
        self.tokens = sealed_tokens + tail
        self.sinks = None
        if sinks and self.sealed:
            positions = torch.stack(
                [torch.randperm(sealed_tokens, generator=self.random)[:sinks] for _ in range(batch)]
            )
            positions[0, 0] = -1
            self.sinks = Sinks(
                self.normal(batch, kv_heads, sinks, key_dim).to(dtype),
                self.normal(batch, kv_heads, sinks, value_dim).to(dtype),
                positions.to(torch.int32),
            )

    def normal(self, *shape):
        return torch.randn(shape, generator=self.random)

    def seal(self, codecs, kv_heads, key_dim, value_dim, block, entries, dtype, shortened):
        if not entries:
            return None
        slots = self.batch * entries + 2
        arenas = []
        for spec, role, head_dim in zip(codecs, ("key", "value"), (key_dim, value_dim), strict=True):
            codec = BlockCodec(CodecSpec.parse(spec).fitted_to(head_dim, block), role, head_dim, block, dtype)
            encoded, _ = codec.encode(self.normal(slots, kv_heads, block, head_dim).to(dtype))
            arenas.append((codec, encoded))
        table = torch.randperm(slots, generator=self.random)[: self.batch * entries].view(self.batch, entries)
        lengths = torch.full((self.batch, entries), block)
        if shortened:
            lengths[:, entries // 2] -= 3
        starts = torch.cat([torch.zeros(self.batch, 1, dtype=torch.int64), lengths.cumsum(1)], dim=1)
        (key_codec, keys), (value_codec, values) = arenas
        return Sealed(key_codec, value_codec, keys, values, table.to(torch.int32), starts.to(torch.int32))

    def mask(self, kind, heads=1, batch=None):
        shape = (batch or self.batch, heads, self.queries, self.tokens)
        if kind == "boolean":
            return torch.rand(shape, generator=self.random) < 0.7
        return self.normal(*shape) if kind == "additive" else None

    def arguments(self, mask=None, softcap=0.0, head_sinks=None):
        scale = self.query.shape[-1] ** -0.5
        return self.query, self.tail, self.sealed, self.sinks, mask, scale, softcap, head_sinks


def naive(query, tail, sealed, sinks, mask, scale, softcap, head_sinks):
    """All K and V decoded and put together, one softmax over all, in float64."""
    keys, values = [], []
    for row in range(query.shape[0]):
        parts = []
        for codec, arenas, exact, exact_tail in (
            (sealed and sealed.key_codec, sealed and sealed.keys, sinks and sinks.keys, tail.keys),
            (sealed and sealed.value_codec, sealed and sealed.values, sinks and sinks.values, tail.values),
        ):
            pieces = []
            if sealed:
                starts = sealed.starts[row].tolist()
                for slot, start, stop in zip(sealed.table[row].tolist(), starts, starts[1:], strict=False):
                    block = {name: arena[slot : slot + 1] for name, arena in arenas.items()}
                    pieces.append(codec.decode(block)[0, :, max(-start, 0) : stop - start].double())
            states = torch.cat([*pieces, exact_tail[row].double()], dim=1)
            if sinks is not None:
                for sink, position in enumerate(sinks.positions[row].tolist()):
                    if 0 <= position < int(sealed.starts[row, -1]):
                        states[:, position] = exact[row, :, sink].double()
            parts.append(states)
        keys.append(parts[0])
        values.append(parts[1])
    group = query.shape[1] // tail.keys.shape[1]
    keys = torch.stack(keys).repeat_interleave(group, dim=1)
    values = torch.stack(values).repeat_interleave(group, dim=1)
    scores = query.double() @ keys.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    tokens, queries = scores.shape[-1], query.shape[2]
    if mask is None:
        mask = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    if head_sinks is not None:
        column = head_sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
        values = torch.cat([values, torch.zeros_like(values[:, :, :1])], dim=2)
    return torch.nan_to_num(scores.softmax(dim=-1)) @ values


def check(case, run, mask=None, softcap=0.0, head_sinks=None, tolerance=2e-5):
    arguments = case.arguments(mask, softcap, head_sinks)
    output, expected = run(*arguments), naive(*arguments)
    assert output.dtype == case.query.dtype and output.shape == expected.shape
    assert (output.double() - expected).abs().max() <= tolerance
