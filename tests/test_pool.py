"""The block pool without a model: numbers, slots and counts."""

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


def slots(blocks, numbers):
    return [blocks.slot(number) for number in numbers]


def test_slots_are_given_out_in_order_and_held_once():
    blocks = pool(4)
    numbers = store(blocks, 3)[0]
    assert slots(blocks, numbers) == [0, 1, 2]
    assert [blocks.references(number) for number in numbers] == [1, 1, 1]
    assert blocks.used == 3


def test_a_released_slot_is_reused_after_those_never_used_and_its_number_never():
    blocks = pool(4)
    first, second, third = store(blocks, 3)[0]
    blocks.release([second])
    blocks.release([first])
    again = store(blocks, 3)[0]
    assert slots(blocks, again) == [3, 1, 0]
    assert not {first, second, third} & set(again)


def test_growth_stops_at_a_limit_unless_more_is_needed():
    blocks = pool(4, growth_factor=3.0)
    numbers, capacities = [], []
    for _ in range(5):
        numbers += store(blocks, 2, limit=7)[0]
        capacities.append(blocks.capacity)
    assert capacities == [4, 4, 7, 8, 10]
    assert sorted(slots(blocks, numbers)) == list(range(10)) and blocks.used == 10


def test_a_shared_slot_is_free_when_its_last_holder_lets_go():
    blocks = pool(2)
    (slot,), _, _ = store(blocks, 1)
    blocks.share([slot, slot])
    assert blocks.references(slot) == 3
    blocks.release([slot])
    blocks.release([slot])
    assert blocks.used == 1
    blocks.release([slot])
    assert blocks.used == 0


@pytest.mark.parametrize("spec", ["full", "int8 token", "fp8 token", "int4 token"])
def test_what_was_stored_is_what_is_read_after_growth(spec):
    blocks = pool(2, spec)
    numbers, keys, values = store(blocks, 2)
    for seed in range(1, 5):
        store(blocks, 3, seed)
    for arenas, encoded in ((blocks.keys, keys), (blocks.values, values)):
        for name, tensor in encoded.items():
            assert torch.equal(arenas[name][slots(blocks, numbers)].float(), tensor.float())
    assert all(torch.equal(blocks.gather("key", numbers)[name].float(), keys[name].float()) for name in keys)


def test_blocks_are_read_where_they_lie_in_a_buffer_until_it_is_full():
    keys, values = torch.randn(2, HEADS, 29, HEAD_DIM), torch.randn(2, HEADS, 29, 2 * HEAD_DIM)
    key_codec, value_codec = (
        BlockCodec(CodecSpec(), role, states.shape[3], BLOCK, torch.float32)
        for role, states in (("key", keys), ("value", values))
    )
    blocks, table = BlockPool.over((key_codec, value_codec), (keys, values), 3, 1, 1.5)
    assert all(arena.data_ptr() in (keys.data_ptr(), values.data_ptr()) for arena in blocks.tensors)
    assert (blocks.used, blocks.capacity) == (2, 4)

    def assert_read():
        for role in ("key", "value"):
            read = blocks.gather(role, [row[0] for row in table])["codes"]
            assert torch.equal(read, expected[role])

    expected = {"key": keys[:, :, 3:11].clone(), "value": values[:, :, 3:11].clone()}
    assert_read()
    tail = keys[:, :, 11:19].clone()
    new = torch.randn(2, HEADS, BLOCK, HEAD_DIM)
    stored = blocks.store({"codes": new}, {"codes": torch.cat([new, new], dim=3)})
    assert blocks.growths == 0 and torch.equal(keys[:, :, 19:27], new)
    assert torch.equal(keys[:, :, 11:19], tail)  # which others read
    more = blocks.store({"codes": new}, {"codes": torch.cat([new, new], dim=3)})
    assert blocks.growths == 1
    assert torch.equal(blocks.gather("key", [*stored, *more])["codes"], torch.cat([new, new]))
    assert_read()


def test_what_destructors_drop_is_released_before_anybody_counts():
    blocks = pool(4)
    numbers, _, _ = store(blocks, 3)
    blocks.share(numbers[:1])
    blocks.drop(numbers)
    assert blocks.used == 1 and blocks.references(numbers[0]) == 1


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
    with pytest.raises(KeyError):
        getattr(blocks, step)([slot])


def test_growth_that_fails_leaves_the_pool_as_it_was(monkeypatch):
    blocks = pool(2)
    numbers, keys, values = store(blocks, 2)
    arenas = dict(blocks.keys)

    def no_memory(*args):
        raise MemoryError

    monkeypatch.setattr("memos_hf.blocks.pool._enlarged", no_memory)
    with pytest.raises(MemoryError):
        blocks.store(keys, values)
    assert blocks.capacity == 2 and blocks.used == 2 and blocks.keys == arenas
    assert [blocks.references(number) for number in numbers] == [1, 1]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["store", "share", "release"]), st.integers(0, 10)), max_size=30))
def test_counts_follow_a_plain_model_of_them(steps):
    blocks, held = pool(1), []
    for step, number in steps:
        if step == "store":
            stored, _, _ = store(blocks, number % 3 + 1)
            assert not set(stored) & set(held)
            held += stored
        elif held:
            slot = held[number % len(held)]
            if step == "share":
                blocks.share([slot])
                held.append(slot)
            else:
                blocks.release([slot])
                held.remove(slot)
        assert blocks.used == len(set(held))
        assert all(blocks.references(number) == held.count(number) for number in held)
        assert len(set(slots(blocks, set(held)))) == len(set(held)) <= blocks.capacity
