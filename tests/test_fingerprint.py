"""What a fingerprint tells apart, and what it does not."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from families import FAMILIES
from tiny import SHAPE, llama
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from memos_hf import MemOSCache
from memos_hf.store import Fingerprint


def built(seed: int = 0, **fields: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | fields)).eval()


def difference(saved: Any, model: Any) -> str | None:
    return Fingerprint.of_model(saved).difference(Fingerprint.of_model(model))


def test_it_survives_json():
    fingerprint = Fingerprint.of_model(llama())
    assert Fingerprint.parse(json.loads(json.dumps(fingerprint.to_json()))) == fingerprint
    for wrong in (None, {}, {"config": None}):
        with pytest.raises(ValueError, match="fingerprint: expected config, dtype, weights and adapters"):
            Fingerprint.parse(wrong)


def test_the_same_model_agrees_however_it_is_built_named_or_attends():
    assert difference(llama(), built()) is None
    other = built()
    other.config._name_or_path = "elsewhere"
    other.config._attn_implementation = "eager"
    other.config.transformers_version = "6.0"
    other.config.use_cache = False
    assert difference(llama(), other) is None


def test_weights_of_any_layer_are_told_apart():
    for name, _ in llama().named_parameters():
        other = built()
        with torch.no_grad():
            other.get_parameter(name).mul_(1.01)
        assert difference(llama(), other) == (
            "weights: 1 of 30 parameters are not those that the cache was computed with"
        )


def test_config_dtype_and_numbers_of_layers_are_named():
    assert "number of layers" in difference(llama(), built(num_hidden_layers=2))
    assert "number of attention heads" in difference(llama(), built(num_attention_heads=8, head_dim=16))
    assert "rope_parameters" in difference(llama(), built(rope_parameters={"rope_type": "default", "rope_theta": 5.0}))
    assert "dtype" in difference(llama(), built().double())


def test_fields_that_only_one_version_of_transformers_writes_do_not_count():
    fingerprint = Fingerprint.of_config(llama().config)
    older = Fingerprint({name: value for name, value in fingerprint.config.items() if name != "mlp_bias"})
    assert older.difference(fingerprint) is None
    assert fingerprint.difference(older) is None


def test_what_is_not_known_does_not_differ():
    whole = Fingerprint.of_model(llama())
    for less in (Fingerprint(), Fingerprint.of_config(built(seed=1).config)):
        assert less.difference(whole) is None
        assert whole.difference(less) is None
    assert MemOSCache().fingerprint == Fingerprint()
    assert MemOSCache(llama().config).fingerprint == Fingerprint.of_config(llama().config)
    assert MemOSCache.for_model(llama()).fingerprint == whole


def test_offloaded_weights_are_passed_over_and_the_others_compared():
    def offloaded(seed: int) -> LlamaForCausalLM:
        model = built(seed)
        cpu_offload(model.model.layers[0], execution_device="cpu")
        assert model.model.layers[0].self_attn.q_proj.weight.device.type == "meta"
        return model

    assert difference(llama(), offloaded(0)) is None
    assert difference(offloaded(0), llama()) is None
    assert "parameters are not those" in difference(offloaded(0), built(seed=1))
    assert "parameters are not those" in difference(llama(), offloaded(1))


def test_tied_weights_count_as_often_as_they_have_names():
    tied = built(tie_word_embeddings=True)
    assert len(Fingerprint.of_model(tied).weights) == len(Fingerprint.of_model(built()).weights)


class Adapted(nn.Module):
    """As PEFT wraps a linear layer."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({name: nn.Linear(64, 2, bias=False) for name in ("one", "two")})
        self.lora_B = nn.ModuleDict({name: nn.Linear(2, 64, bias=False) for name in ("one", "two")})
        self.scaling = {"one": 2.0, "two": 1.0}
        self.active_adapters = ["one"]
        self.disable_adapters = False


def test_active_adapters_are_told_apart_and_idle_ones_do_not_count():
    model = built()
    attention = model.model.layers[1].self_attn
    adapted = attention.q_proj = Adapted(attention.q_proj)
    one = Fingerprint.of_model(model)
    assert one.adapters == ("one (2.0)",)
    assert "adapters: the cache was computed with []" in Fingerprint.of_model(llama()).difference(one)
    with torch.no_grad():
        adapted.lora_B["two"].weight.add_(1)
    assert one.difference(Fingerprint.of_model(model)) is None
    with torch.no_grad():
        adapted.lora_B["one"].weight.add_(1)
    assert "weights: 1 of 32" in one.difference(Fingerprint.of_model(model))
    adapted.active_adapters = ["two"]
    assert "adapters" in one.difference(Fingerprint.of_model(model))
    adapted.disable_adapters = True
    assert Fingerprint.of_model(llama()).difference(Fingerprint.of_model(model)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_any_dtype_and_shape_can_be_sampled(dtype):
    model = built()
    model.extra = nn.ParameterList(
        nn.Parameter(torch.ones(shape).to(dtype), requires_grad=False)
        for shape in ((), (0, 3), (7,), (40, 50), (40, 2))
    )
    model.extra[4].data = model.extra[4].data.T
    weights = Fingerprint.of_model(model).weights
    assert "-" not in weights
    assert len(weights) == 8 * 35


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_has_one(family):
    model = family.build()
    fingerprint = Fingerprint.of_model(model)
    assert Fingerprint.parse(json.loads(json.dumps(fingerprint.to_json()))) == fingerprint
    assert fingerprint.difference(Fingerprint.of_model(copy.deepcopy(model))) is None


@pytest.mark.slow
def test_it_takes_less_than_a_tenth_of_a_second_for_smollm2():
    from smollm2 import load_model

    model, _ = load_model()
    Fingerprint.of_model(model)
    start = time.perf_counter()
    Fingerprint.of_model(model)
    assert time.perf_counter() - start < 0.1
