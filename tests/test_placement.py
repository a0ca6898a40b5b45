"""accelerate places the layers: device maps, offloaded weights, tensor parallelism."""

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from families import FAMILIES, Subject, greedy
from tiny import CACHE_ARGUMENT, SHAPE, dynamic, generate, llama, token_ids
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    EncoderDecoderCache,
    LlamaForCausalLM,
)

from memos_hf import MemOSCache
from memos_hf.placement import layer_devices, mapped_device


@pytest.mark.parametrize(
    ("device_map", "expected"),
    [
        ({"": "cpu"}, "cpu"),
        ({"": 0}, "cuda:0"),
        ({"model.layers.1": 0, "model.layers.10": 1}, "cuda:0"),
        ({"model.layers.1": 0, "model.layers.1.self_attn": 1}, "cuda:1"),
        ({"model.embed_tokens": 0, "model.layers.1": "cpu"}, "cuda:0"),
        ({"model.embed_tokens": "cpu", "model.layers.0": 1, "model.layers.1": "disk"}, "cuda:1"),
        ({"model.embed_tokens": "cpu", "model.layers.1": "disk"}, "cpu"),
        ({"": torch.device("cuda:1")}, "cuda:1"),
    ],
)
def test_offloaded_weights_are_computed_on_the_first_accelerator(device_map, expected):
    assert mapped_device("model.layers.1.self_attn", device_map) == torch.device(expected)


def test_a_module_that_the_device_map_does_not_name_is_where_its_weights_are():
    assert mapped_device("base_model.model.layers.1.self_attn", {"model.layers.1": 0}) is None
    model = copy.deepcopy(llama())
    model.hf_device_map = {"somewhere.else": 0}
    assert layer_devices(model) == dict.fromkeys(range(3), torch.device("cpu"))


def test_without_a_device_map_a_layers_cache_is_where_its_weights_are():
    assert layer_devices(llama()) == dict.fromkeys(range(3), torch.device("cpu"))


def test_buffers_exist_before_the_first_token_and_are_the_ones_that_are_filled():
    model = llama()
    cache = MemOSCache.for_model(model, batch_size=2, initial_capacity=64)
    assert cache.is_initialized
    assert cache.get_seq_length() == 0
    allocated = cache.memory().allocated_bytes
    assert allocated >= 3 * 2 * 2 * 2 * 64 * 16 * 4  # layers, K and V, batch, heads, tokens, head dim, float32
    pointers = [layer.buffer.tensors[0].data_ptr() for layer in cache.layers]
    assert torch.equal(generate(model, token_ids(2, 9), cache), generate(model, token_ids(2, 9), dynamic(model)))
    assert [layer.buffer.tensors[0].data_ptr() for layer in cache.layers] == pointers
    assert cache.memory().allocated_bytes == allocated


def test_a_wrong_guess_of_the_shape_is_redone_at_the_first_update():
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 4, "num_hidden_layers": 2},
        kv_lora_rank=20,
        q_lora_rank=8,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    )
    model = DeepseekV3ForCausalLM(config).eval()
    cache = MemOSCache.for_model(model, batch_size=5)
    ids = token_ids(2, 6)
    assert torch.equal(generate(model, ids, cache), generate(model, ids, dynamic(model)))
    assert cache.layers[0].keys.shape[3] != cache.layers[0].values.shape[3]
    assert cache.layers[0].keys.shape[0] == 2


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    llama().save_pretrained(folder)
    return folder


def test_weights_offloaded_to_disk_by_a_device_map_give_the_same_tokens(saved_model, tmp_path, lossless):
    device_map = dict.fromkeys(
        ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
    )
    device_map |= dict.fromkeys(("model.layers.1", "model.layers.2"), "disk")
    model = AutoModelForCausalLM.from_pretrained(
        saved_model, device_map=device_map, offload_folder=tmp_path / "offload"
    ).eval()
    assert model.model.layers[1].self_attn.q_proj.weight.device.type == "meta"
    cache = MemOSCache.for_model(model, batch_size=2, **lossless)
    assert {layer.keys.device.type for layer in cache.layers} == {"cpu"}
    ids = token_ids(2, 6)
    assert torch.equal(generate(model, ids, cache), generate(llama(), ids, dynamic(llama())))


def test_weights_offloaded_to_host_memory_by_accelerate_give_the_same_tokens(saved_model, lossless):
    model = cpu_offload(LlamaForCausalLM.from_pretrained(saved_model).eval(), execution_device=torch.device("cpu"))
    ids = token_ids(2, 6)
    cache = MemOSCache(model.config, **lossless)
    assert torch.equal(generate(model, ids, cache), generate(llama(), ids, dynamic(llama())))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_layers_on_an_accelerator_and_on_the_host_have_their_caches_there(saved_model, lossless):
    model = LlamaForCausalLM.from_pretrained(saved_model).eval()
    on_device = ("model.embed_tokens", "model.layers.0", "model.layers.2", "model.norm", "model.rotary_emb", "lm_head")
    device_map = dict.fromkeys(on_device, 0) | {"model.layers.1": "cpu"}
    model = dispatch_model(model, device_map)
    cache = MemOSCache.for_model(model, batch_size=1, **lossless)
    assert {layer.keys.device for layer in cache.layers} == {torch.device("cuda:0")}
    ids = token_ids(1, 6)
    assert torch.equal(generate(model, ids.cuda(), cache).cpu(), generate(llama(), ids, dynamic(llama())))


TENSOR_PARALLEL = """
import sys
import torch
from transformers import AutoModelForCausalLM
from memos_hf import MemOSCache

torch.set_num_threads(1)
folder, result, argument = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
cache = MemOSCache.for_model(model, batch_size=2)
ids = torch.load(f"{result}.ids")
answer = model.generate(ids, max_new_tokens=12, do_sample=False, **{argument: cache})
if torch.distributed.get_rank() == 0:
    torch.save({"answer": answer, "heads": cache.layers[0].keys.shape[1]}, result)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_tensor_parallel_processes_give_the_tokens_of_one(saved_model, tmp_path):
    script, result = tmp_path / "run.py", tmp_path / "answer.pt"
    script.write_text(TENSOR_PARALLEL)
    ids = token_ids(2, 6)
    torch.save(ids, f"{result}.ids")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    done = subprocess.run(
        [*command, str(script), str(saved_model), str(result), CACHE_ARGUMENT],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(result)
    assert torch.equal(found["answer"], generate(llama(), ids, dynamic(llama())))
    assert found["heads"] == 1, "each process holds one of the two key-value heads"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_can_be_preallocated_for(family, lossless):
    model = family.build()
    cache = MemOSCache.for_model(model, batch_size=3, **lossless)
    assert cache.memory().used_bytes == 0
    subject = Subject(model, family.encoder_features)
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, MemOSCache.for_model(model, **lossless))
    torch.testing.assert_close(greedy(subject, cache), greedy(subject, subject.dynamic_cache()))


@pytest.mark.parametrize("model", [3, llama().config, torch.nn.Linear(2, 2)])
def test_what_is_not_a_model_is_refused(model):
    with pytest.raises(TypeError, match="model: expected a transformers model"):
        MemOSCache.for_model(model)


def test_static_buffers_made_for_another_batch_are_made_anew():
    model = llama()
    cache = MemOSCache.for_model(model, batch_size=1, static=True, max_cache_len=24)
    ids = token_ids(2, 6)
    assert torch.equal(generate(model, ids, cache), generate(model, ids, dynamic(model)))
