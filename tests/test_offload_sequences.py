"""Random sequences of operations on several offloaded caches that share a tiny budget, checked at every read."""

import copy
import errno
import gc
import os
import random
import threading
import time

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from memos_hf import KVQuantizationConfig, MemoryBudget, MemOSCache, OffloadConfig

LAYERS, HEADS, KEY_DIM, VALUE_DIM, BLOCK = 2, 2, 8, 16, 8
BLOCK_BYTES = BLOCK * HEADS * (KEY_DIM + VALUE_DIM) * 4
CPU = torch.device("cpu")
SEQUENCES, STEPS = 500, 14


class Twins:
    """An offloaded cache and a DynamicCache, to which the same is done."""

    def __init__(self, make, seed):
        self.random, self.seeds = random.Random(seed), torch.Generator().manual_seed(seed)
        self.make = make
        self.begin()

    def begin(self):
        self.ours, self.theirs = self.make(), DynamicCache()
        self.batch = self.random.randint(1, 3)

    @property
    def length(self):
        return self.theirs.get_seq_length()

    def states(self, tokens):
        """K and V of which no two tokens, heads or layers are alike."""
        shapes = ((self.batch, HEADS, tokens, dim) for dim in (KEY_DIM, VALUE_DIM))
        return [torch.randn(shape, generator=self.seeds) for shape in shapes]

    def step(self):
        """Update and attend, layer by layer; by few queries or many, with or without a mask."""
        tokens = self.random.choice([1, 1, 1, 2, 7, 20, 40])
        mask = None
        if tokens > 1 or self.random.random() < 0.3:
            total = self.length + tokens
            mask = torch.arange(total) <= torch.arange(self.length, total)[:, None]
            mask = mask.expand(self.batch, 1, -1, -1)
        for layer_idx in range(LAYERS):
            states, query = self.states(tokens), self.states(tokens)[0].repeat(1, 2, 1, 1)
            ours = self.ours.update(*states, layer_idx)
            theirs = self.theirs.update(*states, layer_idx)
            outputs = [
                scaled_dot_product_attention(query, *both, attn_mask=mask, enable_gqa=True) for both in (ours, theirs)
            ]
            torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)

    def crop(self):
        tokens = self.random.randint(0, min(self.length, 25))
        self.ours.crop(-tokens)
        self.theirs.crop(-tokens)

    def reorder(self):
        if self.length:
            rows = torch.tensor([self.random.randrange(self.batch) for _ in range(self.batch)])
            self.ours.reorder_cache(rows)
            self.theirs.reorder_cache(rows)

    def repeat(self):
        if self.length and self.batch < 3:
            self.ours.batch_repeat_interleave(2)
            self.theirs.batch_repeat_interleave(2)
            self.batch *= 2

    def select(self):
        if self.length:
            rows = torch.tensor([self.random.randrange(self.batch)])
            self.ours.batch_select_indices(rows)
            self.theirs.batch_select_indices(rows)
            self.batch = 1

    def copy(self):
        self.ours = copy.deepcopy(self.ours)

    def move_out(self):
        self.ours.offload_all()

    def move_in(self):
        self.ours.prefetch_all()

    def reset(self):
        self.ours.reset()
        self.theirs = DynamicCache()

    def fail(self):
        """A step during which the disk fails, once or from some call on: it is taken back, or succeeds."""
        call = self.random.choice(["preadv", "pwritev", "posix_fallocate"])
        real, left = getattr(os, call), [self.random.randint(0, 3)]

        def failing(*args):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.EIO, "Input/output error")
            return real(*args)

        before = copy.deepcopy(self.theirs)
        setattr(os, call, failing)
        try:
            self.step()
        except OSError:
            self.theirs = before
        finally:
            setattr(os, call, real)

    def check(self):
        assert self.ours.get_seq_length() == self.length
        for mine, other in zip(self.ours.layers, self.theirs.layers, strict=False):
            if self.length:
                assert torch.equal(mine.keys, other.keys)
                assert torch.equal(mine.values, other.values)

    def do_something(self, *more):
        moves = [self.crop, self.reorder, self.repeat, self.select, self.copy, self.move_out, self.move_in]
        others = [self.reset, self.begin, self.check, *(getattr(self, name) for name in more)]
        self.random.choice([*[self.step] * 6, *moves, *others])()


def maker(budget, folder, seed):
    """Makes caches of one kind on `budget`."""
    choices = random.Random(seed)
    sinks = choices.choice([0, 2])
    options = {
        "offload": OffloadConfig(budget, folder, policy=choices.choice(["pin", "lru"])),
        "quantization": KVQuantizationConfig("full", "full", sink_tokens=sinks, residual_tokens=0) if sinks else None,
        "block_size": BLOCK,
    }
    return lambda: MemOSCache(**options)


def small_budget(seed):
    return MemoryBudget({"cpu": random.Random(seed).choice([1, 3, 10, 30]) * BLOCK_BYTES})


@pytest.mark.slow
def test_five_hundred_sequences_on_shared_budgets(tmp_path):
    gc.freeze()  # so that collecting after each sequence is fast
    with torch.no_grad():
        for seed in range(SEQUENCES):
            budget = small_budget(seed)
            pairs = [Twins(maker(budget, tmp_path, 3 * seed + index), 3 * seed + index) for index in range(3)]
            order = random.Random(seed)
            for _ in range(STEPS):
                order.choice(pairs).do_something("fail")
            for pair in pairs:
                pair.check()
            del pairs, pair
            for _ in range(100):
                gc.collect()  # the traceback of a failure, which the reader may hold a moment longer
                if budget.held(CPU) == 0:
                    break
                time.sleep(0.01)
            assert budget.held(CPU) == 0, seed
    gc.unfreeze()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_threads_that_share_a_budget_see_their_own_values(tmp_path):
    for seed in range(12):
        budget, failures = small_budget(seed), []

        def run(index, budget=budget, failures=failures):
            try:
                with torch.no_grad():
                    pair = Twins(maker(budget, tmp_path, index), index)
                    for _ in range(4 * STEPS):
                        pair.do_something()
                    pair.check()
            except BaseException as error:
                failures.append((index, error))

        threads = [threading.Thread(target=run, args=(4 * seed + index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
    del budget, run, threads
    gc.collect()
    assert list(tmp_path.iterdir()) == []
