"""What random programs on two caches side by side have in common: operations on rows, copies, grad modes."""

import copy

import hypothesis.strategies as st
import torch
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from transformers import Cache

MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


class SideBySide(RuleBasedStateMachine):
    """Rules that do one thing to `ours` and `theirs`, which have `batch` rows, in grad mode `mode`."""

    def fresh_theirs(self) -> Cache:
        """An empty cache to compare with."""
        raise NotImplementedError

    def length(self) -> int:
        return self.theirs.get_seq_length()

    @rule(mode=st.sampled_from(list(MODES)))
    def switch_mode(self, mode):
        self.mode = mode

    @precondition(lambda self: self.length() > 0)
    @rule(data=st.data())
    def reorder(self, data):
        rows = data.draw(st.lists(st.integers(0, self.batch - 1), min_size=self.batch, max_size=self.batch))
        with MODES[self.mode]():
            for cache in (self.ours, self.theirs):
                cache.reorder_cache(torch.tensor(rows))

    @precondition(lambda self: self.length() > 0 and self.batch <= 3)
    @rule(repeats=st.integers(1, 3))
    def repeat(self, repeats):
        with MODES[self.mode]():
            for cache in (self.ours, self.theirs):
                cache.batch_repeat_interleave(repeats)
        self.batch *= repeats

    @precondition(lambda self: self.length() > 0)
    @rule(data=st.data())
    def select(self, data):
        rows = data.draw(st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=self.batch))
        with MODES[self.mode]():
            for cache in (self.ours, self.theirs):
                cache.batch_select_indices(torch.tensor(rows))
        self.batch = len(rows)

    @rule(batch=st.integers(1, 3))
    def reset(self, batch):
        self.ours.reset()
        self.theirs = self.fresh_theirs()
        self.batch = batch

    @rule()
    def go_on_with_a_copy(self):
        original, self.ours = self.ours, copy.deepcopy(self.ours)
        original.reset()
