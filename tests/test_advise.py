"""What is predicted from a config is what a cache then holds."""

import functools
import json
import re

import pytest
import torch
from families import FAMILIES
from smollm2 import load_model
from tiny import CACHE_ARGUMENT, VERSION, forward, llama, token_ids
from transformers import EncoderDecoderCache, LlamaConfig

import memos_hf
from memos_hf import KVQuantizationConfig, MemOSCache, OffloadConfig
from memos_hf.__main__ import main
from memos_hf.advise import advise, predict, probe

FIGURES = ("used_bytes", "allocated_bytes", "full_precision_bytes")
OPTIONS = {
    "full": {},
    "with room": {"initial_capacity": 120},
    "growing": {"initial_capacity": 4, "layout": "seq_major", "growth_factor": 1.2},
    "blocks": {"quantization": KVQuantizationConfig("full", "full", sink_tokens=2, residual_tokens=0), "block_size": 8},
    "int8": {"quantization": KVQuantizationConfig(residual_tokens=8), "block_size": 8},
    "fp8": {"quantization": "fp8", "block_size": 16},
    "int4": {"quantization": "int4", "block_size": 8},
    "int2": {"quantization": KVQuantizationConfig(2, 2, residual_tokens=16, group_size=8), "block_size": 16},
    "static": {"static": True, "max_cache_len": 120},
}
# Of hybrid layers it is not known, and BLOOM's position bias does not fit to a static cache in older versions.
NOT_STATIC = {"falcon_h1", "qwen3_next"} | ({"bloom"} if VERSION < (5, 24) else set())
# Encoders of other families read features, and their length is not that of token ids.
READING_TEXT = [family for family in FAMILIES if not family.encoder_features]
# One of each kind of layer: full, sliding, chunked, shared, latent, recurrent, hybrid, of a decoder; experts, biases.
KINDS = {"llama", "gpt2", "gemma3", "gemma3n", "llama4", "deepseek_v3", "qwen3_next", "falcon_h1", "t5", "gpt_oss"}


@functools.cache
def built(family):
    return family.build()


@torch.no_grad()
def filled(model, context, new_tokens, batch, options):
    """The caches (two of an encoder-decoder) after a prompt and so many tokens one at a time."""
    ids = token_ids(batch, context) % 90 + 3
    if not model.config.is_encoder_decoder:
        cache = MemOSCache(model.config, **options)
        forward(model, ids, cache)
        for _ in range(new_tokens):
            forward(model, ids[:, :1], cache)
        return [cache]
    caches = [MemOSCache(model.config, **options), MemOSCache(model.config, **options)]
    both = {CACHE_ARGUMENT: EncoderDecoderCache(*caches)}
    encoded = model.get_encoder()(ids)
    for _ in range(1 + new_tokens):
        model(encoder_outputs=encoded, decoder_input_ids=ids[:, :1], **both)
    return caches


def held(caches):
    return [sum(getattr(cache.memory(), name) for cache in caches) for name in FIGURES]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "family",
    [pytest.param(one, id=one.name, marks=() if one.name in KINDS else pytest.mark.slow) for one in READING_TEXT],
)
def test_every_family_holds_what_its_config_says(family):
    model = built(family)
    found = probe(model.config, torch.float32)
    for name, options in OPTIONS.items():
        if name == "static" and (model.config.is_encoder_decoder or family.name in NOT_STATIC):
            continue
        for context, new_tokens, batch in ((90, 6, 2), (37, 3, 1))[: 2 if name in ("full", "int8") else 1]:
            predicted = predict(found, context=context, new_tokens=new_tokens, batch_size=batch, **options)
            measured = held(filled(model, context, new_tokens, batch, options))
            assert [getattr(predicted, name) for name in FIGURES] == measured, (name, context)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_other_dtypes_and_the_presets_with_their_own_block_size(dtype, quantization):
    model = llama()
    predicted = predict(model.config, dtype=dtype, context=700, new_tokens=5, quantization=quantization)
    cache = MemOSCache(model.config, quantization=quantization)
    for tokens in (700, 1, 1, 1, 1, 1):
        for layer_idx in range(3):
            states = torch.randn(1, 2, tokens, 16, dtype=dtype)
            cache.update(states, states, layer_idx)
    assert [getattr(predicted, name) for name in FIGURES] == held([cache])


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_real_model_at_2000_tokens(quantization):
    model, _ = load_model()
    options = {"quantization": quantization, "initial_capacity": 2004}
    predicted = predict(model.config, dtype=torch.float32, context=2000, new_tokens=4, **options)
    measured = held(filled(model, 2000, 4, 1, options))
    assert [getattr(predicted, name) for name in FIGURES] == measured


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("share", [0.2, 0.5, 2.0])
def test_an_offloaded_cache_uses_what_is_predicted_and_stays_below_its_peak(quantization, share):
    model = llama()
    whole = predict(model.config, dtype=torch.float32, context=900, quantization=quantization)
    options = {"quantization": quantization, "block_size": 16}
    budget = OffloadConfig({"cpu": int(share * whole.used_bytes)})
    predicted = predict(model.config, dtype=torch.float32, context=900, new_tokens=2, offload=budget, **options)
    (cache,) = filled(model, 900, 2, 1, {**options, "offload": budget})
    memory = cache.memory()
    assert predicted.used_bytes == memory.used_bytes
    assert memory.by_device["cpu"].allocated_bytes <= predicted.allocated_bytes
    on_disk = memory.by_device["disk"].used_bytes if "disk" in memory.by_device else 0
    assert (on_disk > 0) == (predicted.below_bytes > 0) == (share < 1)
    # Layers have equal parts of a budget, in whole blocks, and part of it is the tails' unused room.
    assert 0 <= on_disk - predicted.below_bytes <= 3 * 16 * 1024


def test_a_probe_counts_weights_and_says_what_it_had_to_guess():
    found = probe(llama().config, torch.float16)
    assert found.weight_bytes >= sum(parameter.numel() * 2 for parameter in llama().parameters())
    assert found.notes == ()
    recurrent = next(family for family in FAMILIES if family.name == "falcon_h1")
    assert "own kinds" in probe(built(recurrent).config).notes[0]


def test_a_model_that_cannot_run_without_data_is_guessed(monkeypatch):
    def refuses(self, *args, **kwargs):
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    expected = predict(llama().config, dtype=torch.float32, context=300)
    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", refuses)
    found = probe(llama().config, torch.float32)
    assert "does not run without data" in found.notes[0]
    assert predict(found, context=300) == expected


@pytest.mark.parametrize(
    ("share", "advised"),
    [(1.2, "full"), (0.6, "int8"), (0.3, "int4"), (0.1, "int8, offloaded"), (0.001, None)],
)
def test_the_most_exact_mode_that_fits_without_offloading_is_advised(share, advised):
    config = LlamaConfig(num_hidden_layers=20, hidden_size=256, num_attention_heads=4, intermediate_size=64)
    found = probe(config, torch.float32)
    full = predict(found, context=8000).used_bytes
    advice = advise(found, memory=int(share * full), context=8000)
    assert (advice.chosen.mode.name if advice.chosen else None) == advised
    if advised is None:
        assert "Nothing fits" in advice.reason
    else:
        assert advice.chosen.prediction.least_bytes <= share * full


def test_the_line_of_code_makes_the_cache_that_was_predicted():
    found = probe(llama().config, torch.float32)
    outlooks = advise(found, memory=800_000, context=700, new_tokens=3).outlooks
    assert {outlook.mode.name for outlook in outlooks if outlook.fits} >= {"int8", "full, offloaded"}
    for outlook in outlooks:
        names = {"model": llama()}
        exec(outlook.code, vars(memos_hf).copy(), names)
        cache = names["cache"]
        with torch.no_grad():
            for tokens in (700, 1, 1, 1):
                forward(llama(), token_ids(1, tokens), cache)
        assert cache.memory().used_bytes == outlook.prediction.used_bytes, outlook.code
        if not outlook.mode.offloaded:
            assert cache.memory().allocated_bytes == outlook.prediction.allocated_bytes, outlook.code


@pytest.mark.parametrize("name", ["context", "new_tokens", "batch_size"])
def test_numbers_below_1_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}: expected an int of at least 1, got 0"):
        predict(llama().config, **{"context": 8, name: 0})


def test_what_cannot_be_combined_is_refused():
    with pytest.raises(ValueError, match="static cannot be combined with offload"):
        predict(llama().config, context=8, static=True, max_cache_len=9, offload=OffloadConfig({"cpu": "1MiB"}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A config, and nothing else."""
    path = tmp_path_factory.mktemp("config")
    llama().config.save_pretrained(path)
    return str(path)


def test_the_command_prints_modes_and_advice(folder, capsys):
    main(["advise", "--model", folder, "--context", "700", "--memory", "1GiB"])
    printed = capsys.readouterr().out
    assert re.search(r"^int8 +\d", printed, re.MULTILINE)
    assert "Take full." in printed
    assert "cache = MemOSCache(model.config, initial_capacity=701)" in printed


def test_the_command_prints_json_or_writes_it(folder, capsys, tmp_path):
    arguments = ["advise", "--model", folder, "--context", "700", "--batch", "2", "--memory", "150000", "--json"]
    main(arguments)
    printed = json.loads(capsys.readouterr().out)
    main([*arguments, str(tmp_path / "advice.json")])
    assert json.loads((tmp_path / "advice.json").read_text()) == printed
    assert "allocated" in capsys.readouterr().out
    used = {row["mode"]: row["used_bytes"] for row in printed["modes"]}
    assert used["int8"] == predict(llama().config, context=700, batch_size=2, quantization="int8").used_bytes


def test_the_command_takes_off_the_weights(folder, capsys):
    arguments = ["advise", "--model", folder, "--context", "700", "--dtype", "bfloat16", "--json", "--memory", "1MiB"]
    main([*arguments, "--weights"])
    report = json.loads(capsys.readouterr().out)
    assert report["memory_bytes"] == (1 << 20) - report["weight_bytes"]
    with pytest.raises(SystemExit, match="the weights take"):
        main([*arguments[:-1], "1000", "--weights"])


@pytest.mark.parametrize("memory", ["0", "much", "-1GiB"])
def test_the_command_refuses_sizes_that_are_none(folder, memory, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["advise", "--model", folder, "--context", "700", f"--memory={memory}"])
    assert "expected bytes or a size such as 24GiB" in capsys.readouterr().err


def test_the_command_says_in_a_line_that_there_is_no_such_model(tmp_path):
    with pytest.raises(SystemExit, match=r"^advise: [^\n]+$"):
        main(["advise", "--model", str(tmp_path / "none"), "--context", "700", "--memory", "1GiB"])
