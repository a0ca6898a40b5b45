"""Random sequences of every operation on a MemOSCache and a DynamicCache side by side, compared after each."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, invariant, precondition, rule
from side_by_side import MODES, SideBySide
from tiny import SHAPE
from transformers import DynamicCache, Gemma3TextConfig

from memos_hf import KVQuantizationConfig, MemoryBudget, MemOSCache, OffloadConfig

HEADS, KEY_DIM, VALUE_DIM = 2, 5, 8
# The second window is so long that some of it lies in sealed blocks.
SHORT_WINDOW, LONG_WINDOW = (
    Gemma3TextConfig(
        **SHAPE, sliding_window=window, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    )
    for window in (6, 30)
)
FULL_ONLY = Gemma3TextConfig(**SHAPE, layer_types=["full_attention"] * 3)
LOSSLESS = KVQuantizationConfig("full", "full", sink_tokens=2, residual_tokens=8)


class TwoCaches(SideBySide):
    """Every rule does one thing to both caches."""

    @initialize(
        capacity=st.integers(1, 40),
        factor=st.sampled_from([1.01, 1.5, 3.0]),
        layout=st.sampled_from(["head_major", "seq_major"]),
        config=st.sampled_from([SHORT_WINDOW, LONG_WINDOW, FULL_ONLY, None]),
        batch=st.integers(1, 3),
        record=st.booleans(),
        kind=st.sampled_from(["buffers", "blocks", "offloaded"]),
        policy=st.sampled_from(["pin", "lru"]),
    )
    def build(self, capacity, factor, layout, config, batch, record, kind, policy):
        self.config, self.batch, self.record = config, batch, record
        self.options = {"initial_capacity": capacity, "growth_factor": factor, "layout": layout}
        if kind != "buffers":
            self.options |= {"layout": "head_major", "quantization": LOSSLESS, "block_size": 8}
        if kind == "offloaded":
            self.options["offload"] = OffloadConfig(MemoryBudget({"cpu": 20_000}), policy=policy)
        self.ours = MemOSCache(config, **self.options)
        self.theirs = self.fresh_theirs()
        if record:
            self.ours.activate_past_recording()
        self.seed = 0
        self.mode = "no_grad"

    def fresh_theirs(self) -> DynamicCache:
        cache = DynamicCache(config=self.config) if self.config is not None else DynamicCache()
        if self.record:
            cache.activate_past_recording()
        return cache

    @rule(tokens=st.one_of(st.just(1), st.integers(1, 50)))
    def update(self, tokens):
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        with MODES[self.mode]():
            for layer_idx in range(3):
                keys = torch.randn(self.batch, HEADS, tokens, KEY_DIM, generator=generator)
                values = torch.randn(self.batch, tokens, HEADS, VALUE_DIM, generator=generator).transpose(1, 2)
                size, offset = self.ours.get_mask_sizes(tokens, layer_idx)
                assert (size, offset) == self.theirs.get_mask_sizes(tokens, layer_idx)
                ours = self.ours.update(keys, values, layer_idx)
                theirs = self.theirs.update(keys, values, layer_idx)
                for mine, other in zip(ours, theirs, strict=True):
                    assert mine.shape[2] == size
                    # before 5.18 a recording layer of transformers' returned more than it announced
                    assert torch.equal(mine, other[:, :, -size:])

    @rule(steps=st.integers(2, 30))
    def decode(self, steps):
        for _ in range(steps):
            self.update(1)

    @precondition(lambda self: self.length() > 0)
    @rule(tokens=st.integers(0, 12))
    def crop(self, tokens):
        tokens = min(tokens, self.length())
        if self.cannot_roll_back(tokens):
            with pytest.raises(RuntimeError):
                self.ours.crop(-tokens)
            return
        self.ours.crop(-tokens)
        self.theirs.crop(-tokens)

    def cannot_roll_back(self, tokens) -> bool:
        """Whether a window would miss tokens: transformers' layers then keep less than they announce."""
        if self.config not in (SHORT_WINDOW, LONG_WINDOW) or self.length() < self.config.sliding_window:
            return False
        held = min(layer.keys.shape[2] for layer in self.ours.layers)
        return not self.record or held - tokens < min(self.length() - tokens, self.config.sliding_window - 1)

    @precondition(lambda self: "offload" in self.options)
    @rule(prefetch=st.booleans())
    def move(self, prefetch):
        if prefetch:
            self.ours.prefetch_all()
        else:
            self.ours.offload_all()

    @rule()
    def convert_there_and_back(self):
        with MODES[self.mode]():
            dynamic = self.ours.to_dynamic()
            self.ours = MemOSCache.from_cache(dynamic, **self.options)

    @rule()
    def convert_from_dynamic_cache(self):
        with MODES[self.mode]():
            self.ours = MemOSCache.from_cache(self.theirs, **self.options)

    @rule()
    def assign_each_others_tensors(self):
        for mine, other in zip(self.ours.layers, self.theirs.layers, strict=False):
            if mine.is_initialized and other.is_initialized and mine.get_seq_length():
                mine.keys, mine.values = other.keys, other.values

    @invariant()
    def content_is_equal(self):
        if not hasattr(self, "ours"):
            return
        for mine, other in zip(self.ours.layers, self.theirs.layers, strict=False):
            assert mine.get_seq_length() == other.get_seq_length()
            if mine.get_seq_length():
                assert torch.equal(mine.keys, other.keys)
                assert torch.equal(mine.values, other.values)
        report = self.ours.memory()
        assert report.used_bytes <= report.allocated_bytes


TwoCaches.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
test_random_sequences_of_operations = TwoCaches.TestCase
