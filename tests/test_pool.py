"""The block pool without a model: exact slots, counts and free order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memos_hf.blocks.codecs import BlockCodec, CodecSpec
from memos_hf.blocks.pool import BlockPool

HEADS, HEAD_DIM, BLOCK = 2, 8, 8


def pool(capacity=4, spec="int8 token", growth_factor=1.5):
    codecs = [BlockCodec(CodecSpec.parse(spec), role, HEAD_DIM, BLOCK, torch.float32) for role in ("key", "value")]
    return BlockPool(*codecs, HEADS, torch.device("cpu"), capacity, growth_factor)


def store(blocks, count, seed=0, limit=None):
    states = torch.randn(count, HEADS, BLOCK, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    keys, _ = blocks.key_codec.encode(states)
    values, _ = blocks.value_codec.encode(-states)
    return blocks.store(keys, values, limit), keys, values


def test_slots_are_given_out_in_order_and_held_once():
    blocks = pool(4)
    assert store(blocks, 3)[0] == [0, 1, 2]
    assert [blocks.references(slot) for slot in range(4)] == [1, 1, 1, 0]
    assert blocks.used == 3


def test_a_released_slot_is_reused_after_those_never_used():
    blocks = pool(4)
    store(blocks, 3)
    blocks.release([1])
    blocks.release([0])
    assert store(blocks, 3)[0] == [3, 1, 0]


def test_growth_stops_at_a_limit_unless_more_is_needed():
    blocks = pool(4, growth_factor=3.0)
    capacities = [(store(blocks, 2, limit=7), blocks.capacity)[1] for _ in range(5)]
    assert capacities == [4, 4, 7, 8, 10]
    assert len({slot for slot in range(10) if blocks.references(slot)}) == blocks.used == 10


def test_a_shared_slot_is_free_when_its_last_holder_lets_go():
    blocks = pool(2)
    (slot,), _, _ = store(blocks, 1)
    blocks.share([slot, slot])
    assert blocks.references(slot) == 3
    blocks.release([slot])
    blocks.release([slot])
    assert blocks.used == 1
    blocks.release([slot])
    assert blocks.used == 0 and blocks.references(slot) == 0


@pytest.mark.parametrize("spec", ["full", "int8 token", "fp8 token", "int4 token"])
def test_what_was_stored_is_what_is_read_after_growth(spec):
    blocks = pool(2, spec)
    slots, keys, values = store(blocks, 2)
    for seed in range(1, 5):
        store(blocks, 3, seed)
    for arenas, encoded in ((blocks.keys, keys), (blocks.values, values)):
        for name, tensor in encoded.items():
            assert torch.equal(arenas[name][slots].float(), tensor.float())


def test_arenas_grow_by_the_factor_or_to_what_is_needed():
    blocks = pool(4)
    store(blocks, 4)
    store(blocks, 1)
    assert (blocks.capacity, blocks.growths) == (6, 1)
    store(blocks, 20)
    assert (blocks.capacity, blocks.growths) == (25, 2)
    assert all(arena.shape[0] == 25 for arena in blocks.tensors)


def test_ten_thousand_blocks_take_few_growths():
    blocks = pool(1)
    for _ in range(2000):
        store(blocks, 1)
    assert blocks.growths <= 20


def test_bytes_per_slot_are_those_of_the_codecs():
    blocks = pool(4, "int4 token")
    assert blocks.bytes_per_slot == blocks.key_codec.bytes_per_block(HEADS) + blocks.value_codec.bytes_per_block(HEADS)
    assert sum(arena.untyped_storage().nbytes() for arena in blocks.tensors) == 4 * blocks.bytes_per_slot


@pytest.mark.parametrize("step", ["share", "release"])
def test_a_slot_that_nobody_holds_can_be_neither_shared_nor_released(step):
    blocks = pool(2)
    (slot,), _, _ = store(blocks, 1)
    blocks.release([slot])
    with pytest.raises(AssertionError):
        getattr(blocks, step)([slot])


def test_growth_that_fails_leaves_the_pool_as_it_was(monkeypatch):
    blocks = pool(2)
    slots, keys, values = store(blocks, 2)
    arenas = dict(blocks.keys)

    def no_memory(*args):
        raise MemoryError

    monkeypatch.setattr("memos_hf.blocks.pool._enlarged", no_memory)
    with pytest.raises(MemoryError):
        blocks.store(keys, values)
    assert blocks.capacity == 2 and blocks.used == 2 and blocks.keys == arenas
    assert [blocks.references(slot) for slot in slots] == [1, 1]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["store", "share", "release"]), st.integers(0, 10)), max_size=30))
def test_counts_follow_a_plain_model_of_them(steps):
    blocks, held = pool(1), []
    for step, number in steps:
        if step == "store":
            slots, _, _ = store(blocks, number % 3 + 1)
            assert not set(slots) & set(held)
            held += slots
        elif held:
            slot = held[number % len(held)]
            if step == "share":
                blocks.share([slot])
                held.append(slot)
            else:
                blocks.release([slot])
                held.remove(slot)
        assert blocks.used == len(set(held))
        assert all(blocks.references(slot) == held.count(slot) for slot in range(blocks.capacity))
