"""The memory of a layer: what is allocated when, where it starts, who may write it."""

import copy
import gc
import math
import weakref

import pytest
import torch
from tiny import random_states

from memos_hf.layers.buffer import ALIGNMENT_BYTES, KVBuffer


def filled(tokens: int, capacity: int = 8, seq_major: bool = False, **shape: int) -> KVBuffer:
    buffer = KVBuffer(capacity, 1.5, seq_major)
    keys, values = random_states(tokens=tokens, **shape)
    buffer.allocate(keys, values)
    with torch.no_grad():
        buffer.append(keys, values)
    return buffer


@pytest.mark.parametrize("head_dim", [1, 5, 20, 64, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_head_starts_on_an_aligned_address(head_dim, dtype):
    buffer = KVBuffer(10, 1.5)
    keys = torch.randn(2, 3, 7, head_dim, dtype=dtype)
    buffer.allocate(keys, keys)
    for _ in range(3):
        with torch.no_grad():
            buffer.append(keys, keys)
        for tensor in buffer.tensors:
            for row in range(2):
                for head in range(3):
                    assert tensor[row, head].data_ptr() % ALIGNMENT_BYTES == 0
    twin = copy.deepcopy(buffer)
    assert all(tensor.data_ptr() % ALIGNMENT_BYTES == 0 for tensor in twin.tensors)


def test_head_major_keeps_a_head_together_and_seq_major_a_token():
    head_major, seq_major = filled(6), filled(6, seq_major=True)
    assert head_major.tensors[0].is_contiguous()
    assert seq_major.tensors[0].transpose(1, 2).is_contiguous()
    assert head_major.view()[0].shape == seq_major.view()[0].shape


def test_capacity_grows_by_the_factor_and_the_pointer_moves():
    buffer = filled(1, capacity=64)
    keys, values = random_states()
    capacities = {buffer.capacity}
    with torch.no_grad():
        for _ in range(400):
            buffer.append(keys, values)
            capacities.add(buffer.capacity)
    assert buffer.length == 401
    for smaller, larger in zip(sorted(capacities), sorted(capacities)[1:], strict=False):
        assert larger == math.ceil(math.ceil(smaller * 1.5) / 4) * 4  # a head of 4 rows of 32 bytes is aligned
    assert buffer.growths == len(capacities) - 1


def test_one_token_at_a_time_to_ten_thousand_takes_logarithmically_many_allocations(monkeypatch):
    buffer = KVBuffer(256, 1.5)
    keys, values = random_states(heads=1, head_dim=4)
    allocations = []
    original = KVBuffer._empty
    monkeypatch.setattr(KVBuffer, "_empty", lambda *args, **kwargs: allocations.append(1) or original(*args, **kwargs))
    buffer.allocate(keys, values)
    with torch.no_grad():
        for _ in range(10_000):
            buffer.append(keys, values)
    assert buffer.length == 10_000
    assert buffer.growths <= 11
    assert len(allocations) == 2 * (buffer.growths + 1)


def test_a_long_prompt_is_one_allocation_with_room_for_the_answer(monkeypatch):
    allocations = []
    original = KVBuffer._empty
    monkeypatch.setattr(KVBuffer, "_empty", lambda *args, **kwargs: allocations.append(1) or original(*args, **kwargs))
    buffer = filled(1000, capacity=16)
    assert len(allocations) == 2
    assert buffer.growths == 0
    assert buffer.capacity >= 1016


def test_growth_frees_the_old_tensors():
    buffer = filled(8, capacity=8)
    old = [weakref.ref(tensor.untyped_storage()) for tensor in buffer.tensors]
    with torch.no_grad():
        buffer.append(*random_states())
    gc.collect()
    assert all(reference() is None for reference in old)


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("operation", ["append", "take_rows", "replace"])
def test_when_memory_runs_out_nothing_has_changed(monkeypatch, failing, operation):
    buffer = filled(8, capacity=8, batch=2)
    buffer.keep_last(6)
    before = [tensor.clone() for tensor in buffer.view()]
    calls = []
    original = KVBuffer._empty

    def failing_empty(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == failing:
            raise torch.OutOfMemoryError("no memory left")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(KVBuffer, "_empty", failing_empty)
    states = random_states(batch=2, tokens=20)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        if operation == "take_rows":
            buffer.take_rows(torch.tensor([1, 0]))
        else:
            getattr(buffer, operation)(*states)
    for old, new in zip(before, buffer.view(), strict=True):
        assert torch.equal(old, new)
    with torch.no_grad():
        buffer.append(*states)
    assert torch.equal(buffer.view()[1], torch.cat([before[1], states[1]], dim=2))


def test_nothing_beyond_the_pointer_can_be_read():
    buffer = filled(6)
    buffer.remove_last(4)
    assert [tensor.shape[2] for tensor in buffer.view()] == [2, 2]
    buffer.remove_last(99)
    assert buffer.length == 0


@pytest.mark.parametrize("change", ["append", "take_rows", "move_to_front"])
def test_tensors_that_were_handed_over_are_never_written(change):
    keys, values = random_states(tokens=6)
    original = keys.clone(), values.clone()
    buffer = KVBuffer(8, 1.5)
    buffer.adopt(keys, values)
    buffer.remove_last(2)
    with torch.no_grad():
        if change == "take_rows":
            buffer.take_rows(torch.tensor([0, 0]))
        elif change == "move_to_front":
            buffer.keep_last(2)
        buffer.append(*random_states(batch=2 if change == "take_rows" else 1))
    assert torch.equal(keys, original[0])
    assert torch.equal(values, original[1])
    assert not buffer.shared


@pytest.mark.parametrize("kept", [2, 7])
def test_moving_to_the_front_keeps_what_is_valid(kept):
    buffer = filled(12, capacity=12)
    expected = [tensor.clone() for tensor in buffer.view(last=kept)]
    more = random_states(tokens=3)
    buffer.keep_last(kept)
    with torch.no_grad():
        buffer.append(*more)
    assert buffer.growths == 0
    for tensor, old, new in zip(buffer.view(), expected, more, strict=True):
        assert torch.equal(tensor, torch.cat([old, new], dim=2))


def test_memory_is_reused_when_the_next_prompt_fits_and_replaced_when_it_does_not():
    buffer = filled(6, batch=2)
    storage = buffer.tensors[0].data_ptr()
    buffer.clear()
    buffer.allocate(*random_states(batch=2, tokens=4))
    assert buffer.tensors[0].data_ptr() == storage
    buffer.allocate(*random_states(batch=3, tokens=4))
    assert buffer.tensors[0].shape[0] == 3


@pytest.mark.parametrize("seq_major", [False, True])
def test_rows_are_taken_in_order_with_the_room_kept(seq_major):
    buffer = filled(6, seq_major=seq_major, batch=3)
    keys, values = (tensor.clone() for tensor in buffer.view())
    index = torch.tensor([2, 0, 0, 1])
    capacity = buffer.capacity
    with torch.no_grad():
        buffer.take_rows(index)
    assert torch.equal(buffer.view()[0], keys[index])
    assert torch.equal(buffer.view()[1], values[index])
    assert buffer.capacity == capacity
