"""Random calls of a quantized cache and of the reference cache side by side, compared after each."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
import torch
from families import draft_of
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, invariant, precondition, rule
from reference_cache import ReferenceCache
from side_by_side import MODES, SideBySide
from tiny import SHORT, forward, generate, llama, token_ids

from memos_hf import KVQuantizationConfig, MemOSCache
from memos_hf.config import PRESETS

ODD = {
    "fixed scale": KVQuantizationConfig(key_axis="tensor", value_axis="tensor", sink_tokens=2, residual_tokens=8),
    "no residual": KVQuantizationConfig(4, 8, group_size=4, sink_tokens=0, residual_tokens=0),
    "residual of one": KVQuantizationConfig("fp8", 4, sink_tokens=1, residual_tokens=1, rotation="hadamard"),
    "ragged residual": KVQuantizationConfig(2, "full", key_axis="channel", group_size=4, residual_tokens=13),
    "sinks over blocks": KVQuantizationConfig(8, 2, sink_tokens=19, residual_tokens=8, value_group_size=8),
    "layer skipped": KVQuantizationConfig(4, 4, residual_tokens=8, skip_layers=(1,)),
}
CONFIGS = {**PRESETS, **{f"short {name}": preset for name, preset in SHORT.items()}, **ODD}
LAYERS, HEADS, KEY_DIM, VALUE_DIM = 3, 2, 4, 16


class SameCalls(SideBySide):
    """Every rule does one thing to both caches.

    Values are multiples of 1/16, which a rotation of these head dims adds up without rounding: however many blocks
    are encoded at a time, codes cannot differ.
    """

    @initialize(
        name=st.sampled_from(list(CONFIGS)),
        block_size=st.sampled_from([8, 16]),
        capacity=st.sampled_from([1, 40, 256]),
        batch=st.integers(1, 3),
        dtypes=st.sampled_from([(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)]),
    )
    def build(self, name, block_size, capacity, batch, dtypes):
        self.quantization, self.block_size, self.batch = CONFIGS[name], block_size, batch
        self.dtypes = (torch.float32,) * 2 if self.quantization.rotation else dtypes
        self.options = {
            "quantization": self.quantization,
            "block_size": block_size,
            "initial_capacity": capacity,
        }
        self.ours = MemOSCache(**self.options)
        self.theirs = self.fresh_theirs()
        self.random = torch.Generator().manual_seed(0)
        self.mode = "no_grad"

    def fresh_theirs(self) -> ReferenceCache:
        return ReferenceCache(llama().config, self.quantization, self.block_size)

    def states(self, tokens):
        """K and V of so many tokens."""
        return [
            (torch.randint(-64, 65, (self.batch, HEADS, tokens, head_dim), generator=self.random) / 16).to(dtype)
            for head_dim, dtype in zip((KEY_DIM, VALUE_DIM), self.dtypes, strict=True)
        ]

    @rule(tokens=st.one_of(st.just(1), st.integers(1, 20), st.integers(40, 110)))
    def update(self, tokens):
        with MODES[self.mode]():
            for layer_idx in range(LAYERS):
                states = self.states(tokens)
                if self.length():
                    assert self.ours.get_mask_sizes(tokens, layer_idx) == self.theirs.get_mask_sizes(tokens, layer_idx)
                ours = self.ours.update(*states, layer_idx)
                self.compare(ours, self.theirs.update(*states, layer_idx))

    @precondition(lambda self: self.length() > 0)
    @rule(tokens=st.integers(1, 6), rejected=st.integers(0, 6))
    def draft(self, tokens, rejected):
        self.update(tokens)
        self.crop(min(tokens, rejected))

    @precondition(lambda self: self.length() > 0)
    @rule(tokens=st.one_of(st.integers(0, 12), st.integers(0, 100)))
    def crop(self, tokens):
        tokens = min(tokens, self.length())
        for cache in (self.ours, self.theirs):
            cache.crop(-tokens)

    @precondition(lambda self: self.length() > 0)
    @rule()
    def assign(self):
        for mine, other in zip(self.ours.layers, self.theirs.layers, strict=True):
            other.keys, other.values = self.states(other.get_seq_length())
            other.sealed = []
            mine.keys, mine.values = other.keys, other.values

    @precondition(lambda self: self.length() > 0)
    @rule()
    def encode_what_is_decoded_once_more(self):
        """There and back through a DynamicCache, or quantized when it is filled already."""
        dynamic = self.ours.to_dynamic()
        for held, other in zip(dynamic.layers, self.theirs.layers, strict=True):
            other.keys, other.values, other.sealed = held.keys, held.values, []
            other.seal()
        self.ours = MemOSCache.from_cache(dynamic, **self.options)

    @invariant()
    def content_is_equal(self):
        if not hasattr(self, "ours"):
            return
        for mine, other in zip(self.ours.layers, self.theirs.layers, strict=False):
            assert mine.get_seq_length() == other.get_seq_length()
            assert type(mine.get_seq_length()) is int
            if mine.get_seq_length():
                self.compare((mine.keys, mine.values), other.read())
        report = self.ours.memory()
        assert report.used_bytes <= report.allocated_bytes

    def compare(self, ours, theirs):
        # the sums of a decoding rotation round by the number of blocks that are decoded at a time
        tolerance = 1e-5 if self.quantization.rotation else 0
        for mine, other, dtype in zip(ours, theirs, self.dtypes, strict=True):
            assert mine.dtype == dtype
            torch.testing.assert_close(mine, other, rtol=0, atol=tolerance)


SameCalls.TestCase.settings = settings(
    max_examples=100, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
test_random_calls_give_what_the_reference_gives = SameCalls.TestCase


class FedCache(MemOSCache):
    """Stores the keys and values that the reference was given in the same call.

    A model's own would differ by rounding in what attention returned one layer below, and tip a code now and then.
    """

    reference: ReferenceCache

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        given = self.reference.layers[layer_idx]
        new = slice(given.get_seq_length() - key_states.shape[2], None)
        return super().update(given.keys[:, :, new], given.values[:, :, new], layer_idx, *args, **kwargs)


class Conversation:
    """A model called with the reference cache, then in the same way with ours."""

    def __init__(self, model, quantization, padded, seed):
        self.model, self.quantization, self.padded = model, quantization, padded
        self.random = random.Random(seed)
        self.ours = FedCache(model.config, quantization=quantization, block_size=8, initial_capacity=16)
        self.begin()

    def begin(self):
        """A prompt, with rows of different lengths."""
        self.batch = self.random.randint(1, 3)
        self.theirs = self.ours.reference = ReferenceCache(self.model.config, self.quantization, 8)
        self.mask = torch.ones(self.batch, 0, dtype=torch.long)
        padding = [self.random.choice([0, 3, 8, 29]) for _ in range(self.batch)] if self.padded else [0] * self.batch
        self.theirs.begin_rows_at(padding)
        tokens = self.random.choice([5, 30, 70])
        new = (torch.arange(30 + tokens) >= torch.tensor(padding)[:, None]).long()
        for part in new.split(self.random.choice([7, 16, 33, 100]), dim=1):
            self.say(part)

    def say(self, new):
        """Tokens where `new`, `[rows, tokens]`, is 1, and padding elsewhere."""
        ids = token_ids(*new.shape, seed=self.random.randrange(10**6)) * new
        self.mask = torch.cat([self.mask, new], dim=1)
        options = {}
        if self.padded:
            positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
            options = {"attention_mask": self.mask, "position_ids": positions}
        with torch.no_grad():
            theirs, ours = (
                forward(self.model, ids, cache, **options).logits[new == 1] for cache in (self.theirs, self.ours)
            )
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        for mine, other in zip(self.ours.layers, self.theirs.layers, strict=True):
            assert mine.get_seq_length() == other.get_seq_length() == self.mask.shape[1]
            torch.testing.assert_close((mine.keys, mine.values), other.read(), rtol=1e-5, atol=1e-5)

    def one_at_a_time(self):
        for _ in range(self.random.randint(1, 12)):
            self.say(torch.ones(self.batch, 1, dtype=torch.long))

    def draft(self):
        tokens = self.random.randint(2, 6)
        self.say(torch.ones(self.batch, tokens, dtype=torch.long))
        self.remove(self.random.randint(0, tokens))

    def turn(self):
        tokens = self.random.randint(7, 45)
        padding = [[self.random.randrange(7 if self.padded else 1)] for _ in range(self.batch)]
        self.say((torch.arange(tokens) >= torch.tensor(padding)).long())

    def take_back(self):
        first_kept = int(self.mask.argmax(dim=1).max()) + 1
        self.remove(self.random.randint(0, self.random.choice([4, 20, 100])), first_kept)

    def remove(self, tokens, first_kept=1):
        tokens = min(tokens, self.mask.shape[1] - first_kept)
        self.mask = self.mask[:, : self.mask.shape[1] - tokens]
        for cache in (self.ours, self.theirs):
            cache.crop(-tokens)

    def reorder(self):
        rows = torch.tensor([self.random.randrange(self.batch) for _ in range(self.batch)])
        self.mask = self.mask[rows]
        for cache in (self.ours, self.theirs):
            cache.reorder_cache(rows)

    def repeat(self):
        if self.batch > 2:
            return
        self.batch *= 2
        self.mask = self.mask.repeat_interleave(2, dim=0)
        for cache in (self.ours, self.theirs):
            cache.batch_repeat_interleave(2)

    def select(self):
        rows = torch.tensor([self.random.randrange(self.batch) for _ in range(self.random.randint(1, 2))])
        self.batch, self.mask = len(rows), self.mask[rows]
        for cache in (self.ours, self.theirs):
            cache.batch_select_indices(rows)

    def reset(self):
        self.ours.reset()
        self.begin()

    def go_on(self, steps):
        choices = [self.one_at_a_time] * 3 + [self.draft] * 3 + [self.turn] * 2 + [self.take_back] * 2
        choices += [self.reorder, self.repeat, self.select] * 2 + [self.reset]
        for _ in range(steps):
            self.random.choice(choices)()


@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in PRESETS])
def test_a_model_gives_the_logits_that_it_gives_with_the_reference(name, padded):
    for part in range(3):
        conversation = Conversation(llama(), CONFIGS[name], padded, seed=f"{name} {padded} {part}")
        conversation.go_on(15)
        assert conversation.ours.stats.fused_calls > 0


def left_padded():
    ids, mask = token_ids(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[0, :13] = 0
    return ids * mask, mask


def second_turn(cache, **options):
    first = generate(llama(), token_ids(2, 40), cache, **options)
    return generate(llama(), torch.cat([first, token_ids(2, 9, seed=1)], dim=1), cache, **options)


def padded(cache):
    ids, mask = left_padded()
    if isinstance(cache, ReferenceCache):
        cache.begin_rows_at([13, 0])
    return generate(llama(), ids, cache, 20, attention_mask=mask)


WAYS = {
    "greedy": lambda cache: generate(llama(), token_ids(2, 40), cache, 20),
    "beams": lambda cache: generate(llama(), token_ids(2, 40), cache, 20, num_beams=3),
    "left padding": padded,
    "second turn": second_turn,
    "chunked prompt": lambda cache: generate(llama(), token_ids(2, 40), cache, prefill_chunk_size=11),
    "prompt look-up": lambda cache: generate(
        llama(), token_ids(1, 8).repeat(1, 6), cache, 20, prompt_lookup_num_tokens=4
    ),
    "assisted": lambda cache: generate(llama(), token_ids(1, 40), cache, 20, assistant_model=draft_of(llama())),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("preset", SHORT)
def test_every_way_of_generating_gives_the_references_tokens(preset, way):
    ours = MemOSCache(llama().config, quantization=SHORT[preset], block_size=8)
    theirs = ReferenceCache(llama().config, SHORT[preset], 8)
    assert torch.equal(WAYS[way](ours), WAYS[way](theirs))
    assert ours.get_seq_length() == theirs.get_seq_length()
    assert ours.stats.seals > 0
