"""Quality measured against DynamicCache."""

import json
import pydoc_data.topics
import subprocess
import sys
from functools import partial
from itertools import product

import pytest
import torch
from smollm2 import find_smollm2, load_model
from tiny import dynamic, generate, llama, mistral, token_ids
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast

from memos_hf import KVQuantizationConfig, MemOSCache, OffloadConfig
from memos_hf.__main__ import main
from memos_hf.evaluate import Fact, Needle, evaluate, found_by_depth, long_generation, needle
from memos_hf.evaluate.text import first_ids, read_text
from memos_hf.output import print_rows

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;?!()[]{}'\"\n"


class DamagedCache(DynamicCache):
    """Values come back shrunk, the more the longer ago they came."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        ages = torch.arange(values.shape[-2] - 1, -1, -1)[:, None]
        return keys, values * (1 - ages / 400)


def caches(model):
    two_bits = KVQuantizationConfig(2, 2, residual_tokens=8)
    return {
        "exact": lambda: MemOSCache(model.config),
        "two bits": lambda: MemOSCache(model.config, quantization=two_bits, block_size=8),
        "damaged": lambda: DamagedCache(config=model.config),
    }


def left_padded(ids, tokens):
    """`ids` after as many padding tokens, and their mask."""
    mask = torch.ones(ids.shape[0], tokens + ids.shape[1], dtype=torch.long)
    mask[:, :tokens] = 0
    return torch.cat([torch.zeros(ids.shape[0], tokens, dtype=torch.long), ids], dim=1), mask


@pytest.fixture(scope="module")
def characters():
    """A tokenizer with a token for each character, and no chat template."""
    vocabulary = {character: index + 3 for index, character in enumerate(ALPHABET)} | {"<unk>": 0}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_an_exact_cache_loses_nothing_and_others_lose_something():
    model = llama()
    reference, exact, *others = evaluate(model, token_ids(2, 120), caches(model), chunk=16, skip=32, progress=False)
    assert reference.tokens == exact.tokens == 2 * (119 - 32)
    assert reference.kl == 0
    assert exact.mean_kl < 1e-9
    assert exact.top1 == 1
    assert exact.perplexity == pytest.approx(reference.perplexity)
    assert reference.ratio == exact.ratio == 1
    coarse, damaged = others
    assert coarse.mean_kl > 1e-4
    assert coarse.ratio < 1
    assert damaged.mean_kl > 1e-4
    assert damaged.top1 < 1
    assert damaged.ratio is None  # it does not say


def test_perplexity_is_the_models_own():
    model = llama()
    ids = token_ids(1, 60)
    (reference,) = evaluate(model, ids, {}, chunk=7, skip=0, progress=False)
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert reference.perplexity == pytest.approx(float(loss.exp()), rel=1e-4)


def test_what_is_skipped_may_be_read_in_larger_chunks():
    model = llama()
    ids = token_ids(1, 120)
    calls = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        (one,) = evaluate(model, ids, {}, chunk=1, skip=100, skipped_chunk=64, progress=False)
    finally:
        hook.remove()
    assert calls == [64, 36, *[1] * 20]
    (other,) = evaluate(model, ids, {}, chunk=16, skip=100, progress=False)
    assert one.tokens == other.tokens == 19
    assert one.perplexity == pytest.approx(other.perplexity, rel=1e-4)


@pytest.mark.parametrize(("limit", "low", "high"), [(10**9, 1, 1), (30_000, 0.01, 0.99)])
def test_blocks_that_are_found_on_the_device_are_counted(limit, low, high):
    model = llama()
    offload = OffloadConfig({"cpu": limit})
    makers = {"offloaded": lambda: MemOSCache(model.config, offload=offload, block_size=8)}
    reference, quality = evaluate(model, token_ids(1, 70), makers, chunk=1, skip=50, skipped_chunk=25, progress=False)
    assert reference.hit_rate is None
    assert low <= quality.hit_rate <= high
    assert quality.mean_kl < 1e-9
    _, generation = long_generation(model, token_ids(1, 50), makers, new_tokens=20, progress=False)
    assert low <= generation.hit_rate <= high
    assert generation.common_prefix == 20


def test_attending_to_few_blocks_is_an_approximation_that_shows():
    model = llama()
    makers = {
        f"{count} active": partial(
            MemOSCache, model.config, offload=OffloadConfig({"cpu": 10**9}, active_blocks=count), block_size=8
        )
        for count in (100, 6, 1)
    }
    results = evaluate(model, token_ids(1, 120), makers, chunk=1, skip=90, skipped_chunk=90, progress=False)
    _, everything, some, one = (result.mean_kl for result in results)
    assert everything < 1e-6
    assert everything < some < one


def test_padding_is_not_counted_and_changes_nothing():
    model = llama()
    ids = token_ids(1, 80)
    padded, mask = left_padded(ids, 20)
    (plain,) = evaluate(model, ids, {}, chunk=16, skip=10, progress=False)
    (left,) = evaluate(model, padded, {}, attention_mask=mask, chunk=16, skip=10, progress=False)
    assert left.tokens == plain.tokens
    assert left.perplexity == pytest.approx(plain.perplexity, rel=1e-4)


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="input_ids: expected rows of more than 257 tokens"):
        evaluate(llama(), token_ids(1, 100), {"D": lambda: dynamic(llama())})


@pytest.mark.parametrize("measure", [evaluate, long_generation])
def test_the_name_of_the_reference_is_taken(measure):
    with pytest.raises(ValueError, match="caches: expected names other than 'DynamicCache'"):
        measure(llama(), token_ids(1, 300), {"DynamicCache": lambda: dynamic(llama())}, progress=False)


def test_free_generation_is_what_generate_gives_and_forced_shows_the_damage():
    model = llama()
    ids = token_ids(2, 20)
    results = long_generation(model, ids, caches(model), new_tokens=50, window=20, progress=False)
    reference, exact, _, damaged = results
    assert torch.equal(reference.generated, generate(model, ids, new_tokens=50)[:, 20:])
    assert torch.equal(exact.generated, reference.generated)
    assert exact.common_prefix == 50
    assert exact.same == exact.overall.top1 == 1
    assert exact.overall.mean_kl < 1e-9
    assert [(part.first, part.last, part.tokens) for part in exact.windows] == [(1, 20, 40), (21, 40, 40), (41, 50, 20)]
    # The copy that parts from the forced way goes on as the cache would alone.
    alone = generate(model, ids, DamagedCache(config=model.config), new_tokens=50)[:, 20:]
    assert torch.equal(damaged.generated, alone)
    equal = (alone == reference.generated).double()
    assert damaged.same == float(equal.mean()) < 1
    assert damaged.common_prefix == sum(row.tolist().index(0) if 0 in row else 50 for row in equal) / 2
    assert damaged.overall.top1 < 1
    assert damaged.windows[-1].mean_kl > damaged.windows[0].mean_kl > 1e-6  # it grows worse, and that shows


def test_padding_changes_no_generation():
    model = llama()
    ids = token_ids(2, 20)
    padded, mask = left_padded(ids, 9)
    options = {"new_tokens": 20, "chunk": 8, "progress": False}
    plain = long_generation(model, ids, caches(model), **options)
    left = long_generation(model, padded, caches(model), attention_mask=mask, **options)
    for one, other in list(zip(plain, left, strict=True))[:2]:
        assert torch.equal(one.generated, other.generated)


def test_samples_are_drawn_with_the_same_random_numbers_for_all():
    model = mistral()
    ids = token_ids(1, 20)
    exact = {"exact": lambda: MemOSCache(model.config)}
    options = {"new_tokens": 40, "progress": False}
    (greedy,) = long_generation(model, ids, {}, **options)
    reference, ours = long_generation(model, ids, exact, temperature=1.0, seed=1, **options)
    (other,) = long_generation(model, ids, {}, temperature=1.0, seed=2, **options)
    assert torch.equal(reference.generated, ours.generated)
    assert not torch.equal(reference.generated, greedy.generated)
    assert not torch.equal(reference.generated, other.generated)


def test_a_text_in_circles_has_few_distinct_ngrams():
    (result,) = long_generation(llama(), token_ids(1, 5), {}, new_tokens=8, progress=False)
    result.generated = torch.tensor([[1, 2, 1, 2, 1, 2, 1, 2]])
    assert result.distinct == 2 / 5
    result.generated = result.generated[:, :3]
    assert result.distinct == 1


def test_rows_are_plain_figures():
    model = llama()
    (result,) = long_generation(model, token_ids(1, 5), {}, new_tokens=8, window=5, progress=False)
    (quality,) = evaluate(model, token_ids(1, 50), {}, skip=8, progress=False)
    rows = [result.row(), quality.row(), *result.window_rows()]
    assert json.loads(json.dumps(rows)) == rows
    assert [row["first"] for row in result.window_rows()] == [1, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"new_tokens": 0}, "new_tokens: expected at least 1, got 0"),
        ({"window": 2.5}, "window: expected an int, got 2.5"),
        ({"temperature": -1.0}, "temperature: expected at least 0, got -1.0"),
    ],
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        long_generation(llama(), token_ids(1, 5), {}, progress=False, **options)


def test_all_caches_are_asked_at_all_depths(characters):
    model = llama()
    text = "A sentence. Another one! " * 20
    results = needle(model, characters, text, caches(model), tokens=300, depths=(0, 0.5), chunk=32, progress=False)
    names = ["DynamicCache", "exact", "two bits", "damaged"]
    assert [(result.depth, result.cache) for result in results] == list(product((0, 0.5), names))
    for reference, exact, *others in (results[:4], results[4:]):
        assert exact.answer == reference.answer
        assert any(other.answer != reference.answer for other in others)


@pytest.mark.parametrize(
    ("depth", "before"), [(0.0, ""), (0.4, "One two three."), (1.0, "One two three. Four five six.")]
)
def test_the_fact_is_between_sentences(characters, monkeypatch, depth, before):
    prompts = []
    monkeypatch.setattr(
        "memos_hf.evaluate.haystack._answer",
        lambda model, tokenizer, cache, context, question, *_: prompts.append((context, question)) or "it is 7, sir",
    )
    fact = Fact("The number is 7.", "Which number?", "7")
    (result,) = needle(
        llama(), characters, "One two three. Four five six.", {}, tokens=29, depths=[depth], fact=fact, progress=False
    )
    context, question = ("".join(characters.convert_ids_to_tokens(ids[0])) for ids in prompts[0])
    assert result.found
    assert context.partition("The number is 7.")[0].strip() == before
    assert " ".join(context.replace("The number is 7.", "").split()) == "One two three. Four five six. Question:"
    assert question == "Which number?\nAnswer:"


def test_a_prompt_is_a_turn_of_a_chat_where_there_is_a_template(characters, monkeypatch):
    prompts = []
    monkeypatch.setattr(characters, "chat_template", "{% for m in messages %}[{{ m['content'] }}]{% endfor %}:")
    monkeypatch.setattr(
        "memos_hf.evaluate.haystack._answer",
        lambda model, tokenizer, cache, context, question, *_: prompts.append((context, question)) or "",
    )
    fact = Fact("A.", "B?", "C")
    needle(llama(), characters, "Some text. " * 9, {}, tokens=50, depths=[0], fact=fact, progress=False)
    context, question = ("".join(characters.convert_ids_to_tokens(ids[0])) for ids in prompts[0])
    assert context.startswith("[A.\n\nSome text.")
    assert question == "B?]:"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 100}, "tokens: expected at most the 90 that the text has, got 100"),
        ({"tokens": 50, "depths": [1.5]}, "depths: expected numbers from 0 to 1"),
        ({"tokens": 50, "fact": Fact("B.", "C?", "text")}, "fact: expected an answer that is not in the text"),
    ],
)
def test_a_needle_that_says_nothing_is_refused(characters, options, message):
    with pytest.raises(ValueError, match=message):
        needle(llama(), characters, "Some text " * 9, {}, progress=False, **options)


def test_what_is_kept_is_counted_where_the_reference_finds_it():
    results = [
        Needle(cache, 10, depth, found, "")
        for cache, by_depth in {"DynamicCache": (True, False, True), "A": (True, True, False)}.items()
        for depth, found in zip((0.0, 0.5, 1.0), by_depth, strict=True)
    ]
    reference, a = found_by_depth(results)
    assert reference == {"cache": "DynamicCache", "tokens": 10, "0": True, "0.5": False, "1": True, "kept": "2 of 2"}
    assert a["kept"] == "1 of 2"


def test_a_table_is_aligned(capsys):
    print_rows(
        [{"cache": "A", "kl": 0.00001234, "n": 5, "found": True}, {"cache": "Bc", "kl": 1.5, "n": None, "found": 0.0}]
    )
    assert capsys.readouterr().out.splitlines() == [
        "cache       kl  n  found",
        "A      1.2e-05  5    yes",
        "Bc      1.5000         0",
    ]


def test_texts_are_read_from_files(tmp_path, characters):
    pytest.importorskip("datasets")
    plain, rows = tmp_path / "plain.txt", tmp_path / "rows.jsonl"
    plain.write_text("one\n\ntwo\n")
    rows.write_text("".join(json.dumps({"body": body}) + "\n" for body in ("first", "second", "third")))
    assert read_text(str(plain), characters=100) == "one\n\ntwo\n"
    assert read_text(str(rows), column="body", characters=15) == "first\n\nsecond"
    with pytest.raises(ValueError, match=r"column: expected one of \('body',\), got 'text'"):
        read_text(str(rows), characters=15)
    assert characters.decode(first_ids(characters, "one two", 3)[0]) == "one"


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("wikitext:wikitext-2-raw-v1:test", ("wikitext", "wikitext-2-raw-v1", "test")),
        ("somebody/texts", ("somebody/texts", None, "train")),
        ("somebody/texts::validation", ("somebody/texts", None, "validation")),
    ],
)
def test_texts_are_read_from_the_hub(monkeypatch, source, asked):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(name, config, *, split, streaming):
        calls.append((name, config, split))
        return [{"text": "a"}, {"text": "b"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_text(source, characters=100) == "a\n\nb"
    assert calls == [asked]


@pytest.mark.slow
def test_int4_finds_the_needle_wherever_full_precision_does():
    model, tokenizer = load_model()
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    caches = {"int4": partial(MemOSCache, model.config, quantization="int4")}
    results = needle(model, tokenizer, text, caches, tokens=1000, depths=(0.1, 0.5, 0.9), progress=False)
    reference, int4 = found_by_depth(results)
    assert reference["kept"] == int4["kept"] == "3 of 3"
    assert results[-1].ratio < 0.5


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "memos_hf", "eval", *map(str, arguments)], capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
def test_the_command_line_prints_tables_and_writes_json(tmp_path):
    pytest.importorskip("datasets")
    text, report = tmp_path / "text.txt", tmp_path / "quality.json"
    text.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 40)
    common = ["--model", find_smollm2(), "--text", text]
    done = command(
        *common, "--caches", "memos", "memos-int8", "memos-active-1", "--tokens", 200, "--skip", 32, "--generate", 12,
        "--prompt", 40, "--needle", 100, 200, "--depths", 0, 1, "--json", report,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "memos-int8" in done.stdout
    written = json.loads(report.read_text())
    names = ["DynamicCache", "memos", "memos-int8", "memos-active-1"]
    assert [row["cache"] for row in written["quality"]] == names
    assert [row["cache"] for row in written["generation"]] == names
    assert [row["cache"] for row in written["windows"]] == names[1:]
    assert [(row["tokens"], row["depth"]) for row in written["needle"][::4]] == list(product((100, 200), (0, 1)))

    done = command(*common, "--tokens", 9000)
    assert "--tokens: expected at most the 8192 positions of the model" in done.stderr
    done = command(*common, "--tokens", 2000)
    assert "tokens: expected at most the" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--depths", "x"], "--depths: expected a number from 0 to 1, got 'x'"),
        (["--depths", "1.5"], "--depths: expected a number from 0 to 1, got '1.5'"),
        (["--temperature", "-1"], "--temperature: expected a finite number of at least 0, got '-1'"),
        (["--tokens", "-3"], "--tokens: expected an int of at least 0, got '-3'"),
        (["--json", "."], "--json: '.': expected a file, not a folder"),
        (["--json", "/no/folder/x.json"], "--json: '/no/folder/x.json': there is no folder '/no/folder'"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_before_anything_is_loaded(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(["eval", "--model", "none", "--text", "none", *arguments])
    assert message in capsys.readouterr().err


def test_a_folder_is_no_text(tmp_path):
    pytest.importorskip("datasets")
    with pytest.raises(ValueError, match="text: expected a file or a data set on the hub, got the folder"):
        read_text(str(tmp_path), characters=10)
