"""The README's recipes with other libraries: transformers' pipelines, PEFT's adapters, sampling as in TRL."""

import copy

import pytest
import torch
from character_tokenizer import character_tokenizer
from tiny import CACHE_ARGUMENT, dynamic, forward, generate, llama, token_ids
from transformers import pipeline

from memos_hf import CacheFileError, MemOSCache, PrefixStore, generate_batch

PROMPT = "The longest rivers"
CHAT = [{"role": "user", "content": "Which river is the longest?"}]


@pytest.fixture
def pipe():
    return pipeline("text-generation", model=llama(), tokenizer=character_tokenizer(), device="cpu")


@pytest.mark.parametrize("prompt", [PROMPT, CHAT], ids=["text", "chat"])
def test_a_pipeline_writes_the_same_text(pipe, prompt, lossless):
    options = {"max_new_tokens": 24, "do_sample": False}
    cache = MemOSCache.for_model(llama(), **lossless)
    assert pipe(prompt, **options, **{CACHE_ARGUMENT: cache}) == pipe(prompt, **options)
    assert cache.get_seq_length() > 24


def test_a_pipeline_goes_on_with_a_chat_and_reads_only_what_is_new(pipe, monkeypatch):
    options = {"max_new_tokens": 8, "do_sample": False}
    cache = MemOSCache.for_model(llama())
    first = pipe(CHAT, **options, **{CACHE_ARGUMENT: cache})[0]["generated_text"]
    cached = cache.get_seq_length()
    chat = [*first, {"role": "user", "content": "And the next?"}]
    update, read = cache.update, []

    def counted(keys, *rest, **kwargs):
        read.append(keys.shape[-2])
        return update(keys, *rest, **kwargs)

    monkeypatch.setattr(cache, "update", counted)
    second = pipe(chat, **options, **{CACHE_ARGUMENT: cache})
    assert second == pipe(chat, **options)
    assert read[0] + cached + 7 == cache.get_seq_length()


def test_a_pipeline_takes_several_prompts_in_one_batch(pipe):
    options = {"max_new_tokens": 12, "do_sample": False, "batch_size": 2}
    prompts = [PROMPT, "Lakes"]
    cache = MemOSCache.for_model(llama())
    assert pipe(prompts, **options, **{CACHE_ARGUMENT: cache}) == pipe(prompts, **options)


def test_samples_from_a_forked_prompt_are_those_from_a_prompt_read_for_each():
    model, ids = llama(), token_ids(1, 30)
    prompt = MemOSCache.for_model(model)
    with torch.no_grad():
        forward(model, ids[:, :-1], prompt)
    rows = ids.repeat(4, 1)
    options = {"attention_mask": torch.ones_like(rows), "max_new_tokens": 10, "do_sample": True}
    answers = []
    for cache in (prompt.fork(repeats=4), dynamic(model)):
        torch.manual_seed(0)
        answers.append(model.generate(rows, **options, **{CACHE_ARGUMENT: cache}))
    assert torch.equal(*answers)
    assert len(set(map(tuple, answers[0].tolist()))) > 1
    assert prompt.get_seq_length() == 29


peft = pytest.importorskip("peft", reason="PEFT is not installed")
# PEFT's own, with transformers from 5.24 on.
peft_warns = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def lora(**names_and_seeds):
    """The tiny model with LoRA adapters that are no identity, the first of them active."""
    adapted = copy.deepcopy(llama())
    for number, (name, seed) in enumerate(names_and_seeds.items()):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        if number == 0:
            adapted = peft.get_peft_model(adapted, config, adapter_name=name)
        else:
            adapted.add_adapter(name, config)
    return adapted.eval()


def expected(model, ids):
    """What DynamicCache gives, which is not what the model gives without its adapter."""
    answer = generate(model, ids, dynamic(model))
    assert not torch.equal(answer, generate(llama(), ids, dynamic(llama())))
    return answer


@peft_warns
def test_an_adapted_model_gives_dynamic_caches_tokens(lossless):
    model, ids = lora(law=1), token_ids(2, 20)
    assert torch.equal(generate(model, ids, MemOSCache.for_model(model, **lossless)), expected(model, ids))
    with model.disable_adapter():
        plain = generate(llama(), ids, dynamic(llama()))
        assert torch.equal(generate(model, ids, MemOSCache.for_model(model, **lossless)), plain)


@peft_warns
def test_a_merged_adapter_gives_the_same_and_is_another_model(tmp_path):
    model, ids = lora(law=1), token_ids(1, 20)
    answer, cache = expected(model, ids), MemOSCache.for_model(model)
    assert torch.equal(generate(model, ids, cache), answer)
    cache.save(tmp_path / "law")
    merged = copy.deepcopy(model).merge_and_unload()
    assert torch.equal(generate(merged, ids, MemOSCache.for_model(merged)), answer)
    with pytest.raises(CacheFileError, match=r"adapters: the cache was computed with \['law"):
        MemOSCache.load(tmp_path / "law", merged)


@peft_warns
@pytest.mark.filterwarnings("error:.*past_key_values.*:FutureWarning")
@pytest.mark.parametrize("base", [False, True], ids=["peft model", "base model"])
def test_a_prefix_store_does_not_mix_adapters_up(base, tmp_path):
    model, ids = lora(law=1, medicine=2), token_ids(1, 40)
    store = PrefixStore(model.get_base_model() if base else model, tmp_path)

    def answer():
        return store.generate(store.model, ids, max_new_tokens=12, do_sample=False)

    answers = []
    for name in ("law", "medicine"):
        model.set_adapter(name)
        assert store.get(ids)[1] == 0
        answers.append(answer())
        assert torch.equal(answers[-1], expected(model.get_base_model(), ids))
        assert store.get(ids)[1] == 39
    assert not torch.equal(*answers)
    with model.disable_adapter():
        assert store.get(ids)[1] == 0
        assert torch.equal(answer(), generate(llama(), ids, dynamic(llama())))
    model.set_adapter("law")
    hits = store.stats.hits
    assert torch.equal(answer(), answers[0])
    assert store.stats.hits == hits + 1


@peft_warns
def test_a_cache_of_one_adapter_is_neither_kept_nor_loaded_for_another(tmp_path):
    model, ids = lora(law=1, medicine=2), token_ids(1, 20)
    cache = MemOSCache.for_model(model)
    generate(model, ids, cache)
    fork = cache.fork()
    fork.save(tmp_path / "law")
    model.set_adapter("medicine")
    with pytest.raises(ValueError, match=r"adapters: the cache was computed with \['law.*the model has \['medicine"):
        PrefixStore(model).put(generate(model, ids, MemOSCache.for_model(model)), fork)
    with pytest.raises(CacheFileError, match="adapters"):
        MemOSCache.load(tmp_path / "law", model)


@peft_warns
def test_adapters_that_are_virtual_tokens_have_no_prefixes():
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = peft.get_peft_model(copy.deepcopy(llama()), config).eval()
    with pytest.raises(ValueError, match="model: expected adapters that change weights, got PromptTuningConfig"):
        PrefixStore(model)


@peft_warns
def test_batches_take_the_model_that_peft_wraps():
    model, tokenizer = lora(law=1), character_tokenizer()
    options = {"max_new_tokens": 8, "do_sample": False, "progress": False}
    with pytest.raises(TypeError, match=r"got PeftModel; get_base_model\(\) gives it"):
        generate_batch(model, tokenizer, [PROMPT], **options)
    inner = model.get_base_model()
    for output in generate_batch(inner, tokenizer, [PROMPT, "Lakes"], **options):
        ids = torch.tensor([tokenizer(output.prompt).input_ids])
        assert output.token_ids == expected(inner, ids)[0, ids.shape[1] : ids.shape[1] + 8].tolist()


@peft_warns
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_training_goes_on_as_if_nothing_had_been_generated(quantization):
    ids = token_ids(1, 40)

    def gradients(generates):
        model = lora(law=1)
        if generates:
            generate(model, ids, MemOSCache.for_model(model, quantization=quantization))
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    before, after = gradients(False), gradients(True)
    assert before and before.keys() == after.keys()
    assert all("lora" in name and torch.equal(before[name], after[name]) for name in before)
