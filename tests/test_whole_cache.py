"""Operations on the whole cache, compared with DynamicCache."""

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
from tiny import CACHE_ARGUMENT, LOSSLESS, dynamic, forward, generate, llama, mistral, random_states, token_ids
from transformers import Cache, DynamicCache

import memos_hf
from memos_hf import MemOSCache

ROUNDING = 1e-4  # of float32, over the layers of a tiny model


def small(model, **options):
    return MemOSCache(model.config, initial_capacity=4, **options)


def pair_filled(model, tokens=9, batch=2, **options):
    """A MemOSCache and a DynamicCache that were given the same tokens, in two calls: the second one seals blocks."""
    ours, theirs = small(model, **options), dynamic(model)
    with torch.no_grad():
        for seed, count in enumerate((tokens - 1, 1)):
            for layer_idx in range(len(ours.layers)):
                states = random_states(batch, 2, count, 16, seed=10 * layer_idx + seed)
                for cache in (ours, theirs):
                    cache.update(*states, layer_idx)
    return ours, theirs


def assert_same_content(ours, theirs, tolerance=0):
    """A tolerance is for what a model computed from attention to blocks, which rounds otherwise than torch's."""
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys, rtol=0, atol=tolerance)
        torch.testing.assert_close(mine.values, other.values, rtol=0, atol=tolerance)
        assert mine.get_seq_length() == other.get_seq_length()
        assert mine.get_mask_sizes(3) == other.get_mask_sizes(3)


def test_it_is_the_cache_that_transformers_asks_for(storage):
    cache = MemOSCache(llama().config, **storage)
    assert isinstance(cache, Cache)
    assert isinstance(cache, DynamicCache)
    assert not hasattr(cache, "to")
    assert cache.is_compileable is False
    assert len(cache) == 3
    assert cache.get_max_length() == -1
    assert MemOSCache(llama().config, max_cache_len=64, **storage).get_max_length() == 64


@pytest.mark.parametrize("model", [llama, mistral])
@pytest.mark.parametrize("grad", [False, True])
def test_rows_are_reordered_repeated_and_selected_as_in_dynamic_cache(model, grad, lossless):
    ours, theirs = pair_filled(model(), **lossless)
    with torch.set_grad_enabled(grad):
        for cache in (ours, theirs):
            cache.batch_repeat_interleave(3)
            cache.reorder_cache(torch.tensor([5, 4, 0, 1, 1, 2]))
            cache.reorder_cache(torch.tensor([1, 0, 3, 2, 5, 4]))
            cache.batch_select_indices(torch.tensor([4, 0, 1]))
        assert_same_content(ours, theirs)
        for cache in (ours, theirs):
            forward(model(), token_ids(3, 2), cache)
        assert_same_content(ours, theirs, ROUNDING)


@pytest.mark.parametrize("indices", [torch.tensor([True, False]), torch.tensor([-1]), [1], torch.tensor([1, 1, 0])])
def test_rows_are_selected_by_mask_negative_index_or_list(indices, lossless):
    ours, theirs = pair_filled(llama(), **lossless)
    ours.batch_select_indices(indices)
    theirs.batch_select_indices(indices)
    assert_same_content(ours, theirs)


def test_the_caller_may_change_the_indices_afterwards(lossless):
    ours, theirs = pair_filled(llama(), **lossless)
    indices = torch.tensor([1, 0])
    with torch.no_grad():
        ours.reorder_cache(indices)
        theirs.reorder_cache(indices.clone())
        indices.zero_()
    assert_same_content(ours, theirs)


@pytest.mark.parametrize(("remove", "left"), [(0, 3), (-1, 2), (-3, 0), (-5, 0)])
def test_crop_removes_from_the_end(remove, left, storage):
    ours, _ = pair_filled(llama(), tokens=3, **storage)
    ours.crop(remove)
    assert ours.get_seq_length() == left


@pytest.mark.parametrize(("model", "tokens", "removed"), [(llama, 20, 7), (mistral, 6, 2)])
def test_a_length_stays_an_int_when_crop_is_given_a_tensor(model, tokens, removed, lossless):
    ours, theirs = pair_filled(model(), tokens, **lossless)
    ours.crop(torch.tensor(-removed))
    theirs.crop(-removed)
    assert [type(layer.get_seq_length()) for layer in ours.layers] == [int] * 3
    assert_same_content(ours, theirs)


def test_crop_refuses_a_positive_number_and_ignores_layers_without_content(storage):
    cache = small(llama(), **storage)
    cache.crop(-3)
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match="tokens_to_remove: expected a negative int"):
        cache.crop(5)


def test_after_a_crop_only_the_rest_is_visible_and_what_comes_is_appended_to_it(lossless):
    ours, theirs = pair_filled(llama(), tokens=20, **lossless)
    for cache in (ours, theirs):
        cache.crop(-12)
    assert ours.layers[0].keys.shape[2] == 8
    assert_same_content(ours, theirs)
    with torch.no_grad():
        for cache in (ours, theirs):
            forward(llama(), token_ids(2, 50, seed=3), cache)
    assert ours.layers[0].keys.shape[2] == 58
    assert_same_content(ours, theirs, ROUNDING)


@pytest.mark.parametrize("model", [llama, mistral])
@pytest.mark.parametrize("inference", [False, True])
def test_after_reset_a_second_prompt_gives_what_a_fresh_cache_gives(model, inference, storage):
    model = model()
    cache = small(model, **storage)
    with torch.inference_mode(inference):
        forward(model, token_ids(2, 29), cache)
        forward(model, token_ids(2, 1), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert not cache.is_initialized
    assert cache.memory().used_bytes == 0
    second = token_ids(1, 24, seed=5)
    answer = generate(model, second, cache)
    assert torch.equal(answer, generate(model, second, small(model, **storage)))
    if storage in LOSSLESS.values():
        assert torch.equal(answer, generate(model, second, dynamic(model)))


def test_reset_keeps_the_preallocated_memory_for_the_next_prompt():
    cache, _ = pair_filled(llama(), tokens=40)
    before = cache.layers[0].buffer.tensors[0].data_ptr()
    cache.reset()
    with torch.no_grad():
        forward(llama(), token_ids(2, 40), cache)
    # what a graph may have saved would have been dropped; this was filled without one
    assert cache.layers[0].buffer.tensors[0].data_ptr() == before


def test_a_length_taken_before_an_update_does_not_change_with_it_and_layers_are_apart(storage):
    cache = small(llama(), **storage)
    with torch.no_grad():
        cache.update(*random_states(tokens=25), 0)
        length = cache.get_seq_length()
        cache.update(*random_states(tokens=1), 0)
    assert length == 25
    assert type(length) is int
    assert cache.get_seq_length(1) == 0


@pytest.mark.parametrize("model", [llama, mistral])
def test_conversion_from_and_to_dynamic_cache_copies_the_content(model, lossless):
    model = model()
    ours, theirs = pair_filled(model, **lossless)
    converted, back = MemOSCache.from_cache(theirs, initial_capacity=4, **lossless), ours.to_dynamic()
    assert_same_content(converted, theirs)
    assert_same_content(ours, back)
    assert type(back) is DynamicCache
    assert not converted.layers[0].buffer.shared
    ids = token_ids(2, 4, seed=9)
    with torch.no_grad():
        logits = [forward(model, ids, cache).logits for cache in (ours, theirs, converted, back)]
    for other in logits[1:]:
        torch.testing.assert_close(logits[0], other, rtol=ROUNDING, atol=ROUNDING)


def test_conversion_of_an_empty_cache_is_an_empty_cache(storage):
    converted = MemOSCache.from_cache(DynamicCache(), **storage)
    with torch.no_grad():
        converted.update(*random_states(), 1)
    assert [layer.get_seq_length() for layer in converted.layers] == [0, 1]


@pytest.mark.parametrize("with_config", [False, True])
def test_per_layer_data_fills_it_as_it_fills_dynamic_cache(with_config, lossless):
    config = {"config": llama().config} if with_config else {}
    data = [random_states(batch=2, tokens=15, head_dim=16, seed=layer) for layer in range(3)]
    ours, theirs = MemOSCache(data, **config, **lossless), DynamicCache(data, **config)
    assert ours.is_initialized
    assert_same_content(ours, theirs)
    for cache in (ours, theirs):
        forward(llama(), token_ids(2, 2), cache)
    assert_same_content(ours, theirs, ROUNDING)
    assert_same_content(MemOSCache(ddp_cache_data=data, **config, **lossless), DynamicCache(data, **config))


def test_a_cache_without_layers_is_false_and_is_filled_all_the_same(storage):
    model, ids = llama(), token_ids(1, 20)
    cache = MemOSCache(**storage)
    assert not cache
    answer = generate(model, ids, cache)
    assert (len(cache), cache.get_seq_length()) == (3, 31)
    assert torch.equal(answer, generate(model, ids, MemOSCache(model.config, **storage)))


def test_iteration_gives_what_another_cache_can_be_built_from():
    ours, theirs = pair_filled(mistral(), tokens=12)
    rebuilt = MemOSCache(iter(ours))
    for mine, other in zip(rebuilt, theirs, strict=True):
        assert torch.equal(mine[0], other[0])
        assert torch.equal(mine[1], other[1])
        assert mine[2].item() == other[2].item() == 8


def test_models_may_build_a_cache_of_the_given_type_with_dynamic_caches_arguments(storage):
    cache = type(small(llama(), **storage))(config=llama().config, offloading=False, offload_only_non_sliding=True)
    assert len(cache) == 3
    assert len(MemOSCache()) == 0


def test_deep_copies_of_layers_appended_by_a_model_are_layers_like_the_others(storage):
    cache, _ = pair_filled(llama(), **storage)
    cache.layers += [copy.deepcopy(layer) for layer in cache.layers]
    cache.crop(-2)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert {layer.get_seq_length() for layer in cache.layers} == {7}
    assert len(cache) == 6
    assert torch.equal(cache.layers[0].keys, cache.layers[3].keys)


@pytest.mark.parametrize("grad", [False, True])
def test_a_deep_copy_goes_its_own_way(grad, storage):
    model = llama()
    cache = small(model, **storage)
    with torch.set_grad_enabled(grad):
        forward(model, token_ids(1, 26), cache)
        forward(model, token_ids(1, 1), cache)
        twin = copy.deepcopy(cache)
    before = cache.layers[0].keys.clone()
    with torch.no_grad():
        twin.crop(-20)
        forward(model, token_ids(1, 30, seed=1), twin)
        forward(model, token_ids(1, 1), twin)
    assert cache.get_seq_length() == 27
    assert twin.get_seq_length() == 38
    assert torch.equal(cache.layers[0].keys, before)


def test_early_initialization_allocates_and_is_then_filled(lossless):
    model = llama()
    ours, theirs = small(model, **lossless), dynamic(model)
    for cache in (ours, theirs):
        cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
        assert cache.is_initialized
        forward(model, token_ids(2, 5), cache)
    assert_same_content(ours, theirs)


def test_assigned_keys_and_values_are_appended_to_but_never_written(lossless):
    cache = small(llama(), **lossless)
    keys, values = random_states(tokens=16, head_dim=16)
    saved = keys.clone()
    for layer in cache.layers:
        layer.keys, layer.values = keys, values
    assert cache.get_seq_length() == 16
    assert cache.memory().shared_bytes == cache.memory().allocated_bytes > 0
    with torch.no_grad():
        forward(llama(), token_ids(1, 3), cache)
    assert torch.equal(keys, saved)
    assert torch.equal(cache.layers[0].keys[:, :, :16], saved)
    assert cache.memory().shared_bytes == 0


def test_keys_set_without_values_of_their_length_are_refused_at_the_next_update(storage):
    cache, _ = pair_filled(llama(), **storage)
    cache.layers[0].keys = random_states(batch=2, tokens=4, head_dim=16)[0]
    with pytest.raises(RuntimeError, match="keys has 4 tokens and values 9"):
        cache.update(*random_states(batch=2, head_dim=16), 0)


@pytest.mark.parametrize("first_mode", ["inference", "no_grad", "grad"])
@pytest.mark.parametrize("second_mode", ["inference", "no_grad", "grad"])
@pytest.mark.parametrize("model", [llama, mistral])
def test_filled_in_one_mode_it_goes_on_in_another(first_mode, second_mode, model, lossless):
    modes = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": torch.enable_grad}
    model = model()
    cache, expected = small(model, **lossless), dynamic(model)
    with torch.no_grad():
        forward(model, token_ids(2, 16), expected)
        reference = forward(model, token_ids(2, 5, seed=2), expected).logits
    with modes[first_mode]():
        forward(model, token_ids(2, 16), cache)
    with modes[second_mode]():
        logits = forward(model, token_ids(2, 5, seed=2), cache).logits
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.reset()
    torch.testing.assert_close(logits, reference, rtol=ROUNDING, atol=ROUNDING)


def test_dropping_the_cache_frees_everything(storage):
    def fill() -> list[weakref.ref]:
        cache, _ = pair_filled(llama(), tokens=50, **storage)
        storages = [tensor.untyped_storage() for layer in cache.layers for tensor in layer.held_tensors()]
        return [weakref.ref(cache), *map(weakref.ref, storages)]

    references = [reference for _ in range(20) for reference in fill()]
    gc.collect()
    assert all(reference() is None for reference in references)


def test_extra_arguments_of_update_are_accepted(storage):
    cache = small(llama(), **storage)
    keys, values = cache.update(*random_states(), 0, {"cache_position": None}, kwargs={"anything": 1})
    assert keys.shape == values.shape == (1, 2, 1, 8)


def test_autocast_may_give_keys_and_values_of_different_dtypes(lossless):
    cache = small(llama(), **lossless)
    keys, values = random_states(tokens=23)
    for count in (23, 1):
        states = keys[:, :, :count], values[:, :, :count].bfloat16()
        ours = cache.update(*states, 0)
        other = (torch.cat([keys, keys[:, :, :1]], 2), torch.cat([values, values[:, :, :1]], 2).bfloat16())
    assert [tensor.dtype for tensor in ours] == [torch.float32, torch.bfloat16]
    assert torch.equal(ours[0], other[0])
    assert torch.equal(ours[1], other[1])
    ids = token_ids(2, 5)
    for enabled in (True, False):
        mine, other_cache = small(llama(), **lossless), dynamic(llama())
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            for _ in range(3):
                logits = [forward(llama(), ids, cache).logits for cache in (mine, other_cache)]
        # half precision: attention to blocks is summed up in float32, torch's is not
        rounding = {"rtol": 0, "atol": 0.3} if enabled and lossless else {"rtol": ROUNDING, "atol": ROUNDING}
        torch.testing.assert_close(*logits, **rounding)


def test_use_cache_false_leaves_the_same_as_dynamic_cache(lossless):
    ours, theirs = small(llama(), **lossless), dynamic(llama())
    for cache in (ours, theirs):
        llama()(token_ids(1, 4), use_cache=False, **{CACHE_ARGUMENT: cache})
    assert_same_content(ours, theirs)


def test_repr_is_one_line_that_says_what_it_holds():
    cache, _ = pair_filled(llama(), tokens=9)
    text = repr(cache)
    assert "\n" not in text
    assert text.startswith("MemOSCache(3 ContiguousLayer; 9 tokens, ")
    assert "no layers yet; 0 tokens" in repr(MemOSCache())


def test_a_prefix_taken_by_iteration_does_not_change_with_the_cache(storage):
    cache, _ = pair_filled(llama(), tokens=29, **storage)
    prefix = [(keys, values) for keys, values, _ in cache]
    before = [keys.clone() for keys, _ in prefix]
    cache.crop(-15)
    with torch.no_grad():
        for tokens in (20, 1):
            forward(llama(), token_ids(2, tokens, seed=8), cache)
    for (keys, _), old in zip(prefix, before, strict=True):
        assert torch.equal(keys, old)


def test_a_preallocated_cache_without_tokens_converts_into_an_empty_one(storage):
    model = llama()
    cache = MemOSCache.for_model(model, batch_size=1, **storage)
    for empty in (cache.to_dynamic(), MemOSCache.from_cache(cache), DynamicCache(cache)):
        assert forward(model, token_ids(2, 4), empty).logits.shape[0] == 2


def test_type_checkers_find_the_types():
    assert (Path(memos_hf.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("indices", [torch.tensor([True]), torch.ones(5, dtype=torch.bool)])
def test_a_mask_over_another_number_of_rows_is_refused(indices, storage):
    cache, _ = pair_filled(llama(), **storage)
    with pytest.raises(IndexError, match="expected a boolean mask over 2 rows"):
        cache.batch_select_indices(indices)


def test_no_rows_can_be_selected(storage):
    cache, theirs = pair_filled(llama(), **storage)
    cache.batch_select_indices([])
    theirs.batch_select_indices([])
    assert cache.layers[0].keys.shape == theirs.layers[0].keys.shape


def test_a_part_of_a_token_cannot_be_cropped():
    cache, _ = pair_filled(llama())
    with pytest.raises(TypeError):
        cache.crop(-1.5)


@pytest.mark.parametrize("data", [[(torch.zeros(1, 1, 1, 1),)], [torch.zeros(2)], llama().config.to_dict()])
def test_data_that_is_not_keys_and_values_is_refused(data):
    with pytest.raises(TypeError, match="first argument: expected"):
        MemOSCache(data)
