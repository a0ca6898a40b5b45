"""Rows that were one: what they have in common is held once, until it is sealed, and they go on as separate rows do."""

import copy
import random

import pytest
import torch
from tiny import forward, llama, mistral, qwen3_next, token_ids

from memos_hf import KVQuantizationConfig, MemOSCache, OffloadConfig

BLOCK = 8
MODES = {
    "int8": {"quantization": KVQuantizationConfig(residual_tokens=2 * BLOCK), "block_size": BLOCK},
    "full": {
        "quantization": KVQuantizationConfig("full", "full", residual_tokens=2 * BLOCK),
        "block_size": BLOCK,
    },
    "offloaded": {"offload": OffloadConfig({"cpu": 20_000}), "block_size": BLOCK},
    "offloaded int4": {
        "quantization": KVQuantizationConfig(4, 4, residual_tokens=2 * BLOCK),
        "offload": OffloadConfig({"cpu": 20_000}, policy="lru"),
        "block_size": BLOCK,
    },
}


@pytest.fixture(params=MODES)
def mode(request):
    return MODES[request.param]


def read(model, ids, mode, **inputs):
    cache = MemOSCache(model.config, **mode)
    with torch.no_grad():
        for chunk in ids.split(7, dim=1):
            forward(model, chunk, cache)
    return cache


def assert_equal(ours, theirs):
    assert ours.get_seq_length() == theirs.get_seq_length()
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        if hasattr(mine, "lent"):
            for states, expected in zip(mine.lent(), other.lent(), strict=True):
                assert_near(states, expected, 1e-3)


def assert_near(tensor, expected, difference):
    """On average: float tolerance moves a few codes by one."""
    assert tensor.shape == expected.shape
    assert tensor.numel() == 0 or (tensor - expected).abs().mean() < difference


def common_tokens(cache):
    return {layer.buffer.common_tokens for layer in cache.layers if hasattr(layer, "seals")}


class Pair:
    """A cache whose row was repeated, and one that read the same prompt in as many rows."""

    def __init__(self, build, mode, seed):
        self.random, self.model, self.mode = random.Random(seed), build(), mode
        tokens, rows = self.random.randint(20, 60), self.random.randint(2, 4)
        ids = token_ids(1, tokens, seed=seed)
        self.before = read(self.model, ids, mode)
        self.ours = self.before.fork(rows) if seed % 2 else copy.deepcopy(self.before)
        if seed % 2 == 0:
            self.ours.batch_repeat_interleave(rows)
        self.theirs = read(self.model, ids.repeat(rows, 1), mode)
        self.rows, self.steps = rows, 0

    def step(self, tokens=None):
        tokens, self.steps = tokens or self.random.choice([1, 1, 1, 2, 5]), self.steps + 1
        ids = token_ids(self.rows, tokens, seed=self.steps)
        with torch.no_grad():
            ours, theirs = (forward(self.model, ids, cache).logits for cache in (self.ours, self.theirs))
        assert_near(ours, theirs, 2e-3)

    def crop(self):
        if self.model is llama():
            removed = -self.random.randint(1, 12)
            for cache in (self.ours, self.theirs):
                cache.crop(removed)

    def select(self):
        index = torch.tensor([self.random.randrange(self.rows) for _ in range(self.random.randint(1, self.rows + 1))])
        for cache in (self.ours, self.theirs):
            cache.batch_select_indices(index)
        self.rows = len(index)

    def copy(self):
        self.ours = self.random.choice([copy.deepcopy, MemOSCache.fork])(self.ours)

    def move(self):
        if self.ours.options.lease is not None:
            self.ours.offload_all()
            if self.random.random() < 0.5:
                self.ours.prefetch_all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("build", [llama, lambda: mistral(40), qwen3_next], ids=["llama", "mistral", "qwen3_next"])
def test_they_go_on_as_rows_that_never_had_anything_in_common(build, mode, seed):
    pair = Pair(build, mode, seed)
    expected = [states for layer in pair.before.layers if hasattr(layer, "lent") for states in layer.copied()]
    pair.step()
    moves = [pair.step] * 5 + [pair.crop, pair.select, pair.copy, pair.move]
    for _ in range(30):
        pair.random.choice(moves)()
        assert_equal(pair.ours, pair.theirs)
    for _ in range(2 * BLOCK):
        pair.step()
    # The cache they come from has not changed.
    found = [states for layer in pair.before.layers if hasattr(layer, "lent") for states in layer.copied()]
    assert all(torch.equal(*states) for states in zip(found, expected, strict=True))


def test_what_they_have_in_common_is_held_and_sealed_once(mode):
    model = llama()
    cache = read(model, token_ids(1, 63), mode)
    for layer in cache.layers:
        layer.seal()
    (tail,) = {layer.buffer.length for layer in cache.layers}
    rows = cache.fork(8)
    assert common_tokens(rows) == {tail}
    of_each_row = sum(layer.first_tokens.used_bytes for layer in cache.layers)
    assert rows.memory().used_bytes == cache.memory().used_bytes + 7 * of_each_row
    sealed = rows.stats.seals
    with torch.no_grad():
        while any(tokens > 0 for tokens in common_tokens(rows)):
            forward(model, token_ids(8, 1), rows)
    # Its whole blocks once, and the one that is part common, part own, of each row.
    assert rows.stats.seals - sealed == 3 * (tail // BLOCK + (8 if tail % BLOCK else 0))
    blocks = {tuple(row[:-1]) for row in rows.layers[0]._table}
    assert len(blocks) == 1


def test_attention_reads_it_in_place_under_a_mask_too(mode):
    model = llama()
    ids, mask = token_ids(1, 45), torch.ones(1, 45, dtype=torch.long)
    mask[:, :3] = 0
    caches = [MemOSCache(model.config, **mode) for _ in range(2)]
    with torch.no_grad():
        for cache, rows in zip(caches, (1, 4), strict=True):
            for end in (20, 45):
                inputs = ids[:, end - 20 if end == 20 else 20 : end].repeat(rows, 1)
                forward(model, inputs, cache, attention_mask=mask[:, :end].repeat(rows, 1))
        caches[0].batch_repeat_interleave(4)
        mask = mask.repeat(4, 1)
        before = caches[0].stats
        for step in range(30):
            mask = torch.cat([mask, mask.new_ones(4, 1)], dim=1)
            ours, theirs = (
                forward(model, token_ids(4, 1, seed=step), cache, attention_mask=mask).logits for cache in caches
            )
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert caches[0].stats.materialised_calls == before.materialised_calls
    assert caches[0].stats.fused_calls == before.fused_calls + 3 * 30


def test_it_is_saved_and_loaded(mode, tmp_path):
    model = llama()
    rows = read(model, token_ids(1, 45), mode).fork(3)
    with torch.no_grad():
        forward(model, token_ids(3, 2), rows)
    rows.save(tmp_path / "rows.safetensors")
    loaded = MemOSCache.load(tmp_path / "rows.safetensors", model, **mode)
    assert_equal(loaded, rows)
    assert all(
        torch.equal(*states)
        for pair in zip(loaded.layers, rows.layers, strict=True)
        for states in zip(*(layer.lent() for layer in pair), strict=True)
    )


def test_what_inference_mode_left_goes_on_where_gradients_are_recorded(mode):
    model = llama()
    with torch.inference_mode():
        rows = read(model, token_ids(1, 61), mode)
        rows.batch_repeat_interleave(2)
        forward(model, token_ids(2, 1), rows)
        rows.batch_select_indices(torch.tensor([1]))
        rows.batch_repeat_interleave(3)  # with tokens in common already
        assert common_tokens(rows) != {0}
        for step in range(BLOCK + 1):  # some of which are sealed
            forward(model, token_ids(3, 1, seed=step), rows)
    with torch.enable_grad():
        logits = forward(model, token_ids(3, 2), rows).logits
        logits.sum().backward()
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters() if weight.grad is not None)
    model.zero_grad(set_to_none=True)
