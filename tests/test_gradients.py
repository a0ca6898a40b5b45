"""Model calls outside no_grad, and gradients through the cache."""

import pytest
import torch
from tiny import dynamic, forward, generate, llama, mistral, random_states, token_ids

from memos_hf import MemOSCache


def gradients(model):
    result = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return result


@pytest.mark.parametrize("layout", ["head_major", "seq_major"])
@pytest.mark.parametrize("model", [llama, mistral])
def test_backward_through_several_calls_gives_dynamic_caches_gradients(model, layout):
    model = model()
    results = []
    for cache in (MemOSCache(model.config, initial_capacity=4, layout=layout), dynamic(model)):
        loss = torch.zeros(())
        for step, count in enumerate([6, 1, 4, 1]):
            loss = loss + forward(model, token_ids(2, count, seed=step), cache).logits.square().mean()
        loss.backward()
        results.append(gradients(model))
    assert results[0].keys() == results[1].keys()
    for name, gradient in results[0].items():
        torch.testing.assert_close(gradient, results[1][name])


@pytest.mark.parametrize("rows", ["repeat", "reorder", "select", "crop"])
def test_backward_goes_through_row_operations_and_crops(rows):
    model = llama()
    operations = {
        "repeat": lambda cache: cache.batch_repeat_interleave(2),
        "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
        "crop": lambda cache: cache.crop(-2),
    }
    batch = {"repeat": 4, "select": 1}.get(rows, 2)
    results = []
    for cache in (MemOSCache(model.config), dynamic(model)):
        forward(model, token_ids(2, 6), cache)
        operations[rows](cache)
        forward(model, token_ids(batch, 3, seed=1), cache).logits.square().mean().backward()
        results.append(gradients(model))
    for name, gradient in results[0].items():
        torch.testing.assert_close(gradient, results[1][name])


def test_a_prefix_filled_without_gradients_is_followed_by_steps_with_them_and_the_reverse():
    model = llama()
    results = []
    for cache in (MemOSCache(model.config), dynamic(model)):
        with torch.no_grad():
            forward(model, token_ids(1, 6), cache)
        loss = forward(model, token_ids(1, 3, seed=1), cache).logits.square().mean()
        cache.crop(-1)
        with torch.no_grad():  # must not write into what the graph of `loss` saved
            forward(model, token_ids(1, 1, seed=2), cache)
        loss.backward()
        results.append((gradients(model), cache.layers[2].keys.detach().clone()))
    torch.testing.assert_close(results[0][1], results[1][1])
    for name, gradient in results[0][0].items():
        torch.testing.assert_close(gradient, results[1][0][name])


def test_only_the_queries_have_gradients():
    """What attention saved of K and V must not be written by later steps, though they need no gradient themselves."""
    model = llama()
    results = []
    trained = [parameter for name, parameter in model.named_parameters() if "q_proj" in name and "layers.0" in name]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    try:
        for parameter in trained:
            parameter.requires_grad_(True)
        for cache in (MemOSCache(model.config), dynamic(model)):
            loss = torch.zeros(())
            for step in range(4):
                loss = loss + forward(model, token_ids(1, 2, seed=step), cache).logits.square().mean()
            loss.backward()
            results.append(gradients(model))
    finally:
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    for name, gradient in results[0].items():
        torch.testing.assert_close(gradient, results[1][name])


def test_a_plain_call_in_a_notebook_then_generate():
    model = llama()
    ids = token_ids(1, 8)
    cache = MemOSCache(model.config)
    reference = dynamic(model)
    assert torch.equal(forward(model, ids[:, :5], cache).logits, forward(model, ids[:, :5], reference).logits)
    assert torch.equal(generate(model, ids, cache), generate(model, ids, reference))
    assert not cache.layers[0].keys.requires_grad


def test_plain_tensors_are_appended_in_place_although_gradients_could_be_recorded():
    cache = MemOSCache(initial_capacity=64)
    first, _ = cache.update(*random_states(tokens=5), 0)
    second, _ = cache.update(*random_states(tokens=1), 0)
    assert torch.is_grad_enabled()
    assert first.data_ptr() == second.data_ptr() == cache.layers[0].keys.data_ptr()
    assert cache.layers[0].buffer.capacity == 64


@pytest.mark.parametrize("forget", ["reset", "crop"])
def test_what_a_graph_read_is_not_written_after_it_was_forgotten(forget):
    cache, query = MemOSCache(initial_capacity=64), torch.randn(1, 2, 1, 8, requires_grad=True)
    with torch.no_grad():
        cache.update(*random_states(tokens=6), 0)
    keys = cache.layers[0].keys
    expected = (keys.detach().clone() * 2 * (query * keys).sum(-1, keepdim=True)).sum(2, keepdim=True).detach()
    loss = (query * keys).sum(-1).square().sum()
    cache.reset() if forget == "reset" else cache.crop(-3)
    with torch.no_grad():
        cache.update(*random_states(tokens=4), 0)
    loss.backward()
    torch.testing.assert_close(query.grad, expected)


def test_recorded_states_are_held_once():
    cache = MemOSCache()
    keys = torch.randn(1, 2, 5000, 8, requires_grad=True)
    cache.update(keys, keys, 0)
    assert cache.memory().allocated_bytes == 2 * keys.numel() * 4


def test_function_transforms_go_through_the_cache():
    def energy(states: torch.Tensor) -> torch.Tensor:
        cache = MemOSCache()
        cache.update(states[:, :, :2], states[:, :, :2], 0)
        keys, values = cache.update(states[:, :, 2:], states[:, :, 2:], 0)
        return (keys * values).sum()

    states = random_states(tokens=4)[0]
    torch.testing.assert_close(torch.func.grad(energy)(states), 2 * states)
