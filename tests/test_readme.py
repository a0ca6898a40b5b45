"""What the README says is what the package does: its tables, its snippets, its commands, its links."""

import argparse
import ast
import inspect
import re
import runpy
import shlex
import sys
import warnings
from pathlib import Path

import pytest
import torch
from smollm2 import load_model
from tiny import CACHE_ARGUMENT
from transformers import LlamaConfig

from memos_hf import KVQuantizationConfig, MemoryBudget, MemOSCache, OffloadConfig, PrefixStore, generate_batch
from memos_hf.__main__ import main
from memos_hf.config import PRESETS, REFUSED_COMBINATIONS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The code blocks that are marked as of `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def cells(row: str) -> list[str]:
    """The cells of one row of a table."""
    return [cell.strip() for cell in row.strip("|").split("|")]


def table_under(heading: str, first: str = "option") -> dict[str, list[str]]:
    """The rows of the first table under `heading` whose first column is called `first`, by their first cell."""
    section = README.split(f"\n{heading}\n")[1]
    rows = re.search(rf"^\| {first} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", section, flags=re.MULTILINE)[1]
    return {row[0].strip("`"): row[1:] for row in map(cells, rows.splitlines())}


@pytest.mark.parametrize(
    ("called", "heading", "first"),
    [
        (MemOSCache, "### MemOSCache", "option"),
        (KVQuantizationConfig, "### KVQuantizationConfig", "option"),
        (OffloadConfig, "### OffloadConfig and MemoryBudget", "option of OffloadConfig"),
        (MemoryBudget, "### OffloadConfig and MemoryBudget", "option of MemoryBudget"),
        (PrefixStore, "### PrefixStore", "option"),
        (generate_batch, "### generate_batch", "option"),
    ],
)
def test_the_tables_name_every_option_with_its_default(called, heading, first):
    expected = {}
    for name, parameter in inspect.signature(called).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            expected[f"**{name}"] = ""
        elif parameter.default is parameter.empty:
            expected[name] = "required"
        else:
            expected[name] = f"`{parameter.default!r}`".replace("'", '"')
    assert {name: row[0] for name, row in table_under(heading, first).items()} == expected


@pytest.mark.parametrize(
    ("owner", "heading"), [(MemOSCache, "### MemOSCache"), (PrefixStore, "### PrefixStore")], ids=["cache", "store"]
)
def test_the_calls_in_the_tables_have_the_parameters_that_they_are_shown_with(owner, heading):
    shown = [call for cell in table_under(heading, "call") for call in re.findall(r"[^`, ]+\(.*?\)", cell)]
    assert len(shown) >= 4
    for call in (ast.parse(text, mode="eval").body for text in shown):
        named = {argument.id: inspect.Parameter.empty for argument in call.args}
        named |= {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        parameters = inspect.signature(getattr(owner, call.func.attr)).parameters
        taken = {name: p.default for name, p in parameters.items() if name != "self" and p.kind is not p.VAR_KEYWORD}
        assert named == taken, call.func.attr


def test_the_presets_are_what_the_readme_says():
    words = re.search(r'`"int4"` is 4 bits,(.*?); `"int2"`', README, flags=re.DOTALL)[1]
    options = {name: ast.literal_eval(value) for name, value in re.findall(r"`(\w+)=(.*?)`", words)}
    assert {
        "int8": KVQuantizationConfig(),
        "fp8": KVQuantizationConfig(key_bits="fp8", value_bits="fp8"),
        "int4": KVQuantizationConfig(4, 4, **options),
        "int2": KVQuantizationConfig(2, 2, **{**options, "value_group_size": "as keys"}),
    } == PRESETS


def test_the_table_of_refused_combinations_is_the_one_in_the_code():
    table = re.search(r"\| option \| with \| why \|\n\|[-|]+\|\n((?:\|.*\n)+)", README)[1]
    rows = [tuple(cell.strip("`") for cell in cells(row)) for row in table.splitlines()]
    assert rows == list(REFUSED_COMBINATIONS)


def test_the_bytes_of_llama_3_8b_are_those_of_a_layer_of_its_shape():
    heads, layers = 8, 32
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, hidden_size=128)
    for row, tokens in (("8,192", 8192), ("32,768 (Llama 3.1)", 32768)):
        states = torch.randn(1, 1, tokens, 128).bfloat16()
        shown = []
        for quantization in (None, "int8", "int4", "int2"):
            cache = MemOSCache(config, quantization=quantization)
            cache.update(states, states, 0)
            cache.update(states[:, :, :1], states[:, :, :1], 0)  # seals
            shown.append(f"{cache.memory().used_bytes * heads * layers / 2**30:.2f}")
        assert table_under("### Llama 3 8B on 8 GB", "tokens")[row] == shown


def test_links_within_the_readme_lead_somewhere():
    titles = re.findall(r"^#+ (.*)$", README, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    links = set(re.findall(r"\]\(#(.*?)\)", README))
    assert links
    assert links <= anchors


def test_every_file_that_is_named_is_there():
    named = set(re.findall(r"(?:examples|notebooks|tests)/\w+\.\w+", README))
    assert len(named) >= 10
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_blocks_that_are_not_run_say_why_and_are_python():
    assert blocks("py")
    for block in blocks("py"):
        assert block.startswith("# not run in the tests")
        ast.parse(block)


def commands() -> list[str]:
    """Those of ours: in code blocks, in the prose, and in the table of results, as they are run."""
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    in_blocks = [command.strip() for line in lines for command in line.split("&&")]
    in_prose = re.findall(r"`(python (?:examples/\w+\.py|-m memos_hf \w+)[^`]*)`", README)
    in_results = [row[-1].strip("`") for row in table_under("## Results", "what").values()]
    full = {"eval": "python -m memos_hf eval --model ID --text FILE"}
    in_results = [
        re.sub(r"^\S+", lambda name: full.get(name[0], f"python examples/{name[0]}"), command) for command in in_results
    ]
    ours = {command for command in in_blocks + in_prose if re.search(r"examples/|-m memos_hf", command)}
    return sorted(ours | set(in_results))


class Parsed(Exception):  # noqa: N818
    """The command line was parsed; what comes after it is not for this test."""


@pytest.mark.parametrize("command", commands())
def test_commands_name_files_and_options_that_there_are(command, monkeypatch, tmp_path):
    """The command runs until its options are parsed; one that is only named is asked for its help."""
    words = shlex.split(command, comments=True)
    start = words.index("memos_hf" if "memos_hf" in words else re.search(r"examples/\S+", command)[0])
    arguments = words[start + 1 :]
    if len(arguments) < 2:
        arguments.append("--help")
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser, args=None, namespace=None):
        parse(parser, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.chdir(tmp_path)  # output files are checked when they are parsed
    with pytest.raises((Parsed, SystemExit)) as ended:
        if words[start] == "memos_hf":
            main(arguments)
        else:
            monkeypatch.setattr(sys, "argv", [words[start], *arguments])
            runpy.run_path(str(ROOT / words[start]), run_name="__main__")
    assert ended.type is Parsed or ended.value.code in (None, 0)


@pytest.mark.slow
def test_the_snippets_run_one_after_the_other_without_a_warning(monkeypatch, capsys, tmp_path):
    pytest.importorskip("peft", reason="one of the recipes is for PEFT")
    import transformers

    model, tokenizer = load_model()
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name: model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    monkeypatch.chdir(tmp_path)
    names = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)  # PEFT's own
        for number, snippet in enumerate(blocks("python")):
            # The README says what to write before transformers 5.24.
            code = re.sub(r"\bcache=(?=\w)", f"{CACHE_ARGUMENT}=", snippet)
            exec(compile(code, f"snippet {number} of README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "allocated" in printed
    assert "The capital of Italy is Rome" in printed
    assert "of Asia are" in printed
    assert "hits=1" in printed
