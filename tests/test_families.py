"""Every family of models, in every way of generating, gives with MemOSCache what it gives with DynamicCache."""

from __future__ import annotations

import functools
from typing import Any

import families
import pytest
import torch
from families import FAMILIES, Family, Subject, Way

# Where transformers itself refuses. Anything else that DynamicCache cannot do is a fault of the test.
REFUSED = {
    **{
        (name, way): ValueError  # stateful models cannot take back a rejected draft
        for name in ("qwen3_next", "jamba", "bamba", "falcon_h1")
        for way in ("prompt_lookup", "assisted")
    },
    ("whisper", "chunked_prefill"): TypeError,  # its decoder is given positions twice
}
WAYS = (
    families.greedy,
    families.sample,
    families.beams,
    families.left_padding,
    families.second_turn,
    families.chunked_prefill,
    families.prompt_lookup,
    families.assisted,
    families.pieces,
)


WITHOUT_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, WITHOUT_CUDA])])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@functools.cache
def subject(family: Family, device: str) -> Subject:
    return Subject(family.build().to(device), family.encoder_features)


def by_name(parameter: Any) -> str:
    return str(getattr(parameter, "name", None) or parameter.__name__)


@pytest.mark.parametrize("way", WAYS, ids=by_name)
@pytest.mark.parametrize("family", FAMILIES, ids=by_name)
def test_gives_what_dynamic_cache_gives(family: Family, way: Way, device: str) -> None:
    model = subject(family, device)
    refusal = REFUSED.get((family.name, way.__name__))
    if refusal is not None:
        for cache in (model.dynamic_cache(), model.memos_cache()):
            with pytest.raises(refusal):
                way(model, cache)
        return
    cache = model.memos_cache()
    torch.testing.assert_close(way(model, cache), way(model, model.dynamic_cache()))
    assert all(type(cache.get_seq_length(index)) is int for index in families.attention_layers(cache))


@pytest.mark.parametrize("family", FAMILIES, ids=by_name)
def test_after_reset_a_second_prompt_meets_an_empty_cache(family: Family, device: str) -> None:
    model = subject(family, device)
    cache = model.memos_cache()
    families.greedy(model, cache)
    cache.reset()
    # Other prompts of other shapes than before.
    for way in (families.left_padding, families.pieces):
        torch.testing.assert_close(way(model, cache), way(model, model.dynamic_cache()))
        cache.reset()


def test_whispers_own_generate_gives_what_dynamic_cache_gives(device: str) -> None:
    (family,) = (family for family in FAMILIES if family.name == "whisper")
    model = subject(family, device)
    features = model.inputs(model.prompt(2, 1))["input_features"]
    options = {"max_new_tokens": families.NEW_TOKENS, "num_beams": 2}
    ours, theirs = (
        model.model.generate(input_features=features, **families.cache_argument(cache), **options)
        for cache in (model.memos_cache(), model.dynamic_cache())
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES, ids=by_name)
def test_layers_hold_something_where_dynamic_caches_do(family: Family, lossless: dict[str, Any]) -> None:
    """Layers that share the keys and values of others hold nothing."""
    model = subject(family, "cpu")
    held = []
    for cache in (model.memos_cache(**lossless), model.dynamic_cache()):
        model.forward(cache, model.prompt(1, 4))
        layers = getattr(cache, "self_attention_cache", cache).layers
        held.append([getattr(layer, "keys", None) is not None for layer in layers])
    assert held[0] == held[1]


@pytest.mark.parametrize("way", [families.greedy, families.beams, families.assisted], ids=by_name)
@pytest.mark.parametrize(("name", "encoded"), [("t5", 9), ("bart", 9), ("whisper", 10)])
def test_cross_attention_is_written_once_and_never_cropped(
    name: str, encoded: int, way: Way, storage: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (family,) = (family for family in FAMILIES if family.name == name)
    model = subject(family, "cpu")
    cache = model.memos_cache(**storage)
    cross, written = cache.cross_attention_cache, []
    update = cross.update
    monkeypatch.setattr(cross, "update", lambda *args, **kwargs: written.append(args[2]) or update(*args, **kwargs))
    monkeypatch.setattr(cross, "crop", lambda tokens: pytest.fail("cropped"))
    way(model, cache)
    assert written == [0, 1]
    assert [layer.get_seq_length() for layer in cross.layers] == [encoded, encoded]
