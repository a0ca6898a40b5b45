"""`generate_batch`: whatever is batched, padded and shared, each request gets what it gets alone."""

import copy
import dataclasses
import inspect
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from character_tokenizer import character_tokenizer
from families import FAMILIES
from smollm2 import load_model
from tiny import LOSSLESS, generate, llama, mistral, qwen3_next
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria

from memos_hf import MemOSCache, generate_batch
from memos_hf.batches.plan import Abilities, plan
from memos_hf.batches.requests import Request

pytestmark = pytest.mark.filterwarnings("error")

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "batch_dataset.py"
LENGTHS = (1, 20, 2, 7, 7, 3, 13, 7)
EVERYTHING = Abilities(padding=True, padding_between=True, sharing=True)
TOKENIZER = character_tokenizer()


def family(name):
    return next(one for one in FAMILIES if one.name == name).build()


MODELS = {
    "llama": llama,
    "mistral": mistral,
    "gemma3": lambda: family("gemma3"),
    "bloom": lambda: family("bloom"),
    "deepseek_v3": lambda: family("deepseek_v3"),
    "qwen3_next": qwen3_next,
    "jamba": lambda: family("jamba"),
}


def prompts_of_lengths(*lengths, prefix=0, seed=0):
    draw = random.Random(seed)
    shared = [draw.randrange(5, 90) for _ in range(prefix)]
    return [shared + [draw.randrange(5, 90) for _ in range(length)] for length in lengths]


def text_of(ids):
    return TOKENIZER.decode(ids)


def alone(model, ids, new_tokens=12, **options):
    return generate(model, torch.tensor([ids]), new_tokens=new_tokens, **options)[0, len(ids) :].tolist()


def batched(model, prompts, **options):
    options = {"max_new_tokens": 12, "progress": False, **options}
    return generate_batch(model, TOKENIZER, prompts, **options)


def ids_of(outputs):
    return [output.token_ids for output in outputs]


@pytest.fixture
def tokens_read(monkeypatch):
    """How many tokens, padding included, each call of the tiny Llama read."""
    read = []
    forward = type(llama()).forward

    def counting(self, input_ids=None, **inputs):
        read.append(input_ids.numel())
        return forward(self, input_ids=input_ids, **inputs)

    counting.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(type(llama()), "forward", counting)
    return read


@pytest.mark.parametrize("prefix", [0, 40])
@pytest.mark.parametrize("name", MODELS)
def test_each_row_equals_its_run_alone(name, prefix):
    model = MODELS[name]()
    prompts = prompts_of_lengths(*LENGTHS, prefix=prefix)
    expected = [alone(model, ids) for ids in prompts]
    for batch_size in (1, 3, 8):
        outputs = batched(model, prompts, batch_size=batch_size)
        assert ids_of(outputs) == expected
        assert [output.index for output in outputs] == list(range(8))
        assert [output.prompt_tokens for output in outputs] == [len(ids) for ids in prompts]
    assert ids_of(batched(model, prompts, share_prefix=False)) == expected


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4"])
def test_windows_and_chunks_share_a_prefix_among_rows_of_one_length(name):
    model = MODELS[name]() if name in MODELS else family(name)
    prompts = prompts_of_lengths(5, 5, 5, 5, 9, 9, 9, prefix=60)
    made = plan(
        [Request(index, None, tuple(ids), 12) for index, ids in enumerate(prompts)],
        Abilities.of(model, MemOSCache(model.config)),
        batch_size=8,
        share_prefix=True,
    )
    assert len(made.prefix) == 60
    assert [[len(request.token_ids) for request in batch] for batch in made.batches] == [[69] * 3, [65] * 4]
    assert ids_of(batched(model, prompts)) == [alone(model, ids) for ids in prompts]


def test_a_shared_prefix_is_read_once(tokens_read):
    batched(llama(), prompts_of_lengths(3, 5, 5, 2, prefix=50), batch_size=2, max_new_tokens=1)
    assert tokens_read == [50, 2 * 5, 2 * 3]


def test_equal_prompts_and_a_prompt_that_begins_another_keep_a_token_of_their_own(tokens_read):
    (ids,) = prompts_of_lengths(60)
    prompts = [ids, ids, ids[:50]]
    outputs = batched(llama(), prompts, max_new_tokens=3)
    assert tokens_read[:2] == [49, 3 * 11]
    assert ids_of(outputs) == [alone(llama(), ids, 3) for ids in prompts]


def test_a_first_token_in_common_is_not_worth_a_call(tokens_read):
    batched(llama(), prompts_of_lengths(4, 4, 4, prefix=1), max_new_tokens=1)
    assert tokens_read == [15]


def test_strings_and_messages_and_ids_go_together():
    messages = [{"role": "user", "content": "Why?"}]
    ids = TOKENIZER("user: Why?\nassistant: ")["input_ids"]
    outputs = batched(llama(), ["abc", messages, torch.tensor(ids), ids])
    assert ids_of(outputs)[1:] == [alone(llama(), ids)] * 3
    assert outputs[0].token_ids == alone(llama(), TOKENIZER("abc")["input_ids"])
    assert outputs[0].text == text_of(outputs[0].token_ids)
    assert [output.prompt for output in outputs] == ["abc", messages, ids, ids]


def test_a_column_of_a_data_set():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": ["abc", "a longer one", "b"]})
    expected = ids_of(batched(llama(), ["abc", "a longer one", "b"]))
    assert ids_of(batched(llama(), data["text"])) == expected
    with pytest.raises(TypeError, match=r"expected a column, such as dataset\['text'\], got a Dataset"):
        batched(llama(), data)


def test_no_prompts_give_no_outputs():
    assert batched(llama(), []) == []


@pytest.mark.parametrize("prefix", [0, 40])
def test_each_request_has_its_own_limit(prefix, tokens_read):
    prompts = prompts_of_lengths(*LENGTHS, prefix=prefix)
    limits = [1, 30, 2, 17, 5, 30, 4, 3]
    expected = [alone(llama(), ids, limit) for ids, limit in zip(prompts, limits, strict=True)]
    tokens_read.clear()
    outputs = batched(llama(), prompts, max_new_tokens=limits, batch_size=3)
    assert ids_of(outputs) == expected
    assert {output.finish_reason for output in outputs} == {"length"}
    assert [output.new_tokens for output in outputs] == limits
    # The batches run for 30, 5 and 2 tokens.
    assert len([count for count in tokens_read if count <= 3]) <= 29 + 4 + 1 + 1


@pytest.mark.parametrize("prefix", [0, 40])
def test_stop_strings_are_those_of_generate(prefix):
    prompts = prompts_of_lengths(*LENGTHS, prefix=prefix)
    free = [text_of(alone(llama(), ids)) for ids in prompts]
    stops = [[text[4:6]] if index % 2 else None for index, text in enumerate(free)]
    expected = [
        alone(llama(), ids, **({"stop_strings": stop, "tokenizer": TOKENIZER} if stop else {}))
        for ids, stop in zip(prompts, stops, strict=True)
    ]
    outputs = batched(llama(), prompts, stop_strings=stops, batch_size=3)
    assert ids_of(outputs) == expected
    assert [output.finish_reason for output in outputs] == ["length", "stop"] * 4
    assert all(len(ids) <= 6 for ids in expected[1::2])


def test_one_stop_string_for_all_and_one_that_began_in_the_prompt():
    prompts = prompts_of_lengths(3, 9)
    last, first = prompts[0][-1], alone(llama(), prompts[0])[0]
    outputs = batched(llama(), prompts, stop_strings=text_of([last, first]))
    assert outputs[0].token_ids == [first]
    assert outputs[1].new_tokens == 12


def test_an_answer_ends_with_its_end_of_sequence_token():
    prompts = prompts_of_lengths(*LENGTHS)
    eos = alone(llama(), prompts[1])[3]
    expected = [alone(llama(), ids, eos_token_id=eos) for ids in prompts]
    outputs = batched(llama(), prompts, eos_token_id=eos)
    assert ids_of(outputs) == expected
    assert outputs[1].token_ids[-1] == eos
    assert outputs[1].finish_reason == "stop"
    assert {output.finish_reason for output in outputs if output.new_tokens == 12 and output.token_ids[-1] != eos} == {
        "length"
    }


def test_stopping_criteria_end_their_rows():
    class AtToken(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] == token

    prompts = prompts_of_lengths(4, 4, 6)
    token = alone(llama(), prompts[0])[2]
    expected = [alone(llama(), ids, stopping_criteria=[AtToken()]) for ids in prompts]
    assert ids_of(batched(llama(), prompts, stopping_criteria=[AtToken()])) == expected


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.6}, {"no_repeat_ngram_size": 1}, {"bad_words_ids": [[5], [9, 11]]}], ids=str
)
def test_options_that_read_the_prompt_do_not_see_padding(options):
    prompts = prompts_of_lengths(*LENGTHS, prefix=40)
    assert ids_of(batched(llama(), prompts, **options)) == [alone(llama(), ids, **options) for ids in prompts]


@pytest.mark.parametrize("prefix", [0, 40])
def test_beams(prefix):
    prompts = prompts_of_lengths(3, 6, 4, prefix=prefix)
    limits = [8, 12, 12]
    expected = [alone(llama(), ids, limit, num_beams=3) for ids, limit in zip(prompts, limits, strict=True)]
    assert ids_of(batched(llama(), prompts, num_beams=3, max_new_tokens=limits)) == expected
    with pytest.raises(ValueError, match="num_beams: expected 1 with stop strings"):
        batched(llama(), prompts, num_beams=3, stop_strings="a")


@pytest.mark.parametrize("prefix", [0, 40])
def test_several_answers_come_side_by_side(prefix):
    prompts = prompts_of_lengths(3, 6, prefix=prefix)
    torch.manual_seed(0)
    outputs = batched(llama(), [*prompts, ""], do_sample=True, num_return_sequences=3, max_new_tokens=[4, 6, 2])
    assert [(output.index, output.sequence) for output in outputs] == [(i, k) for i in range(3) for k in range(3)]
    assert [output.new_tokens for output in outputs] == [4] * 3 + [6] * 3 + [0] * 3
    torch.manual_seed(0)
    cold = batched(llama(), prompts, do_sample=True, temperature=1e-6, num_return_sequences=2)
    assert ids_of(cold) == [alone(llama(), ids) for ids in prompts for _ in range(2)]


def test_a_generation_config_is_honoured():
    prompts = prompts_of_lengths(3, 6)
    config = GenerationConfig(max_length=10, do_sample=False)
    kept = copy.deepcopy(config)
    outputs = batched(llama(), prompts, max_new_tokens=None, generation_config=config)
    assert ids_of(outputs) == [alone(llama(), prompts[0], 7), alone(llama(), prompts[1], 4)]
    assert config == kept
    assert [output.new_tokens for output in batched(llama(), prompts, max_new_tokens=None)] == [20, 20]


def test_bad_requests_fail_alone(tmp_path):
    model = llama()
    (good,) = prompts_of_lengths(5)
    prompts = [good, "", [], None, {"a": 1}, [1, "a"], [5, 101], [5] * 4090, [{"content": "no role"}], good]
    outputs = batched(model, prompts)
    assert ids_of(outputs)[0] == ids_of(outputs)[-1] == alone(model, good)
    sentences = [output.error for output in outputs[1:-1]]
    for sentence, words in zip(
        sentences,
        [
            "at least one token, got an empty prompt",
            "at least one token, got an empty prompt",
            "expected a string, a list of chat messages or a list of token ids, got NoneType",
            "got dict",
            "got one with 'a'",
            "expected token ids from 0 to 100, got 101",
            r"4096 positions of the model (max_position_embeddings), got 4090 tokens and max_new_tokens=12",
            "",
        ],
        strict=True,
    ):
        assert sentence is None if not words else words in sentence
    assert [output.finish_reason for output in outputs[1:-2]] == ["error"] * 7
    assert all(output.token_ids == [] and output.text == "" for output in outputs[1:-2])


def test_messages_need_a_template_that_takes_them():
    bare = copy.copy(TOKENIZER)
    bare.chat_template = None
    messages = [{"role": "user", "content": "a"}]
    (output,) = generate_batch(llama(), bare, [messages], progress=False)
    assert "the tokenizer has no chat template" in output.error
    bare.chat_template = "{{ raise_exception('roles must alternate') }}"
    (output,) = generate_batch(llama(), bare, [messages], progress=False)
    assert "roles must alternate" in output.error


def test_a_ceiling_holds_for_rows_with_their_padding():
    prompts = prompts_of_lengths(30, 4, 8)
    limits = [3, 29, 20]
    options = {"max_new_tokens": limits, "cache_options": {"max_cache_len": 32}}
    outputs = batched(llama(), prompts, **options)
    assert ids_of(outputs) == [alone(llama(), ids, limit) for ids, limit in zip(prompts, limits, strict=True)]
    outputs = batched(llama(), [*prompts, prompts[0]], **{**options, "max_new_tokens": [*limits, 4]})
    assert outputs[3].error.endswith("32 tokens of the cache (max_cache_len), got 30 tokens and max_new_tokens=4")


@pytest.mark.parametrize("prefix", [0, 300])
def test_other_caches(prefix):
    prompts = prompts_of_lengths(*LENGTHS, prefix=prefix)
    expected = [alone(llama(), ids) for ids in prompts]
    static = {"static": True, "max_cache_len": 400}
    assert ids_of(batched(llama(), prompts, cache_options=static)) == expected
    outputs = batched(llama(), prompts, cache_options={"quantization": "int8"}, batch_size=3)
    assert [output.new_tokens for output in outputs] == [12] * 8
    assert sum(output.token_ids[0] == ids[0] for output, ids in zip(outputs, expected, strict=True)) >= 7


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size: expected at least 1, got 0"),
        ({"batch_size": 2.0}, TypeError, "batch_size: expected an int, got 2.0"),
        ({"share_prefix": 1}, TypeError, "share_prefix: expected True or False, got 1"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens: expected at least 1, got 0"),
        ({"max_new_tokens": [1, 2]}, ValueError, "max_new_tokens: expected one for each of the 1 prompts, got 2"),
        ({"max_new_tokens": ["a"]}, TypeError, "max_new_tokens: expected an int or a sequence of them, got 'a'"),
        ({"max_new_tokens": 1.5}, TypeError, "max_new_tokens: expected one value or a sequence"),
        ({"stop_strings": ""}, ValueError, "stop_strings: expected strings of at least one character"),
        ({"stop_strings": [["a"], ["b"]]}, ValueError, "stop_strings: expected one for each of the 1 prompts, got 2"),
        ({"stop_strings": [[3]]}, TypeError, "stop_strings: expected a string, a list of strings or None"),
        ({"input_ids": torch.ones(1, 1)}, ValueError, "input_ids: not an argument of generate_batch"),
        ({"use_cache": False}, ValueError, "use_cache: not an argument of generate_batch"),
        ({"prompt_lookup_num_tokens": 3}, ValueError, "prompt_lookup_num_tokens: not an argument"),
        ({"generation_config": {}}, TypeError, "generation_config: expected a GenerationConfig, got dict"),
        ({"cache_options": {"growth_factor": 0}}, ValueError, "growth_factor"),
        ({"output_file": "/no/such/folder/file"}, ValueError, "output_file: expected a file in a folder that exists"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_before_anything_is_computed(options, error, message, tokens_read):
    with pytest.raises(error, match=message):
        batched(llama(), [[5, 6]], **options)
    assert tokens_read == []


def test_what_is_no_model_tokenizer_or_list_is_refused():
    for model, tokenizer, prompts, name in [
        (None, TOKENIZER, ["a"], "model"),
        (family("t5"), TOKENIZER, ["a"], "model"),
        (llama(), None, ["a"], "tokenizer"),
        (llama(), TOKENIZER, "a", "prompts"),
        (llama(), TOKENIZER, 3, "prompts"),
    ]:
        with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
            generate_batch(model, tokenizer, prompts)


def test_a_run_that_was_cut_off_goes_on(tmp_path, tokens_read):
    path = tmp_path / "answers.jsonl"
    prompts = [*prompts_of_lengths(*LENGTHS), ""]
    whole = batched(llama(), prompts, output_file=path, batch_size=2)
    content = path.read_bytes()
    assert content.count(b"\n") == 9

    for cut_at in (0, 5, content.index(b"\n") + 1, len(content) // 2, len(content) - 1, len(content)):
        path.write_bytes(content[:cut_at])
        tokens_read.clear()
        assert batched(llama(), prompts, output_file=path, batch_size=2) == whole
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert sorted(line["index"] for line in lines) == list(range(9))
    assert tokens_read == []


def test_what_was_asked_differently_is_generated_anew(tmp_path):
    path = tmp_path / "answers.jsonl"
    prompts = prompts_of_lengths(3, 6)
    batched(llama(), prompts, output_file=path, max_new_tokens=4)
    assert ids_of(batched(llama(), prompts, output_file=path)) == [alone(llama(), ids) for ids in prompts]
    other = [prompts[0], prompts[0]]
    assert ids_of(batched(llama(), other, output_file=path)) == [alone(llama(), prompts[0])] * 2
    assert len(path.read_text().splitlines()) == 5


@pytest.mark.parametrize("content", ["a file of mine\nwith lines\n", "a file of mine", '{"index": 3}\n'])
def test_a_file_that_holds_something_else_is_left_alone(tmp_path, content):
    path = tmp_path / "mine.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match="output_file: expected lines that generate_batch wrote"):
        batched(llama(), [[5, 6]], output_file=path)
    assert path.read_text() == content


def test_a_progress_bar_is_for_terminals(capsys, monkeypatch):
    options = {"progress": True, "max_new_tokens": 1}
    batched(llama(), [[5, 6]], **options)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    batched(llama(), [[5, 6]], **options)
    assert "1/1" in capsys.readouterr().err


def test_an_output_cannot_be_changed():
    (output,) = batched(llama(), [[5, 6]])
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.text = ""


def request_of(index, length, limit=8):
    return Request(index, None, tuple(range(length)), limit)


def test_batches_are_of_about_the_same_limit_then_of_about_the_same_length():
    requests = [request_of(i, n, m) for i, (n, m) in enumerate([(5, 8), (90, 8), (6, 100), (80, 8), (7, 8), (9, 90)])]
    made = plan(requests, EVERYTHING, batch_size=2, share_prefix=False)
    assert [[request.index for request in batch] for batch in made.batches] == [[5, 2], [1, 3], [4, 0]]


@pytest.mark.slow
def test_smollm2_answers_as_it_does_one_by_one():
    model, tokenizer = load_model()
    questions = ["Name a river.", "What is 2 + 2?", "Why is the sky blue? Answer in one sentence.", "Hello!"]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    outputs = generate_batch(model, tokenizer, prompts, max_new_tokens=24, do_sample=False, progress=False)
    for output, messages in zip(outputs, prompts, strict=True):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert output.token_ids == alone(model, ids, 24)
        assert "<|im_end|>" not in output.text


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_example_runs_by_itself_and_under_accelerate(tmp_path, processes):
    pytest.importorskip("datasets")
    folder = tmp_path / "model"
    model = copy.deepcopy(llama())
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    shared = "what all of them begin with, and is long enough to be read once for all " * 4
    prompts = [shared + prompt for prompt in ("abc", "a longer one", "b", "and another", "the last")]
    (tmp_path / "prompts.json").write_text(json.dumps([{"text": prompt} for prompt in prompts]))
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--mixed_precision", "no"]
    command = [
        *[sys.executable, *(launch if processes == 2 else []), str(EXAMPLE), "--model", str(folder)],
        *["--prompts", str(tmp_path / "prompts.json"), "--max-new-tokens", "6", "--limit", "4"],
        *["--output", str(tmp_path / "answers.jsonl"), "--device", "cpu", "--prefixes", str(tmp_path / "prefixes")],
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{processes} process(es)" in done.stdout
    assert list((tmp_path / "prefixes").glob("*.safetensors"))
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    expected = batched(AutoModelForCausalLM.from_pretrained(folder), prompts[:4], max_new_tokens=6)
    assert [(line["index"], line["token_ids"]) for line in lines] == [(o.index, o.token_ids) for o in expected]


@pytest.mark.parametrize(("name", "value"), [("prompt_lookup_num_tokens", 3), ("stop_strings", ["a"])])
def test_what_the_models_own_config_asks_for_is_refused_where_arguments_are(name, value):
    model = copy.deepcopy(llama())
    setattr(model.generation_config, name, value)
    with pytest.raises(ValueError, match=f"{name}: set in model.generation_config"):
        batched(model, ["abc", "b"])
    model.generation_config = copy.deepcopy(llama().generation_config)
    model.generation_config.return_dict_in_generate = True
    assert ids_of(batched(model, ["abc", "b"])) == ids_of(batched(llama(), ["abc", "b"]))


@pytest.mark.parametrize("options", LOSSLESS.values(), ids=LOSSLESS)
def test_windows_in_blocks_do_not_count_padding_behind_a_prefix(options):
    model = mistral(window=40)
    shared = "what all of them begin with is read once" * 5
    prompts = [shared + prompt for prompt in ("abc", "a longer one than that", "b", "and another")]
    together = batched(model, prompts, cache_options=options)
    alone = [batched(model, [prompt], cache_options=options)[0] for prompt in prompts]
    assert ids_of(together) == ids_of(alone)
