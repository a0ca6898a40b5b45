"""A conversation over one cache, and the terminal around it."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
import torch
from character_tokenizer import character_tokenizer
from tiny import llama, mistral

from memos_hf import MemOSCache, OffloadConfig
from memos_hf.__main__ import main
from memos_hf.chat.conversation import Conversation
from memos_hf.chat.terminal import chat

PROMPTS = ("What is a cache?", "And a block?", "Why?")


def conversation(model=None, **options):
    settings = {"max_new_tokens": 12, "temperature": 0.0, **options}
    return Conversation(model or llama(), character_tokenizer(), settings.pop("cache", {}), **settings)


def nothing(text):
    pass


def alone(model, messages, new_tokens=12):
    """The answer that a whole conversation gets with transformers' own cache."""
    ids = character_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    output = model.generate(ids, max_new_tokens=new_tokens, do_sample=False, eos_token_id=2, pad_token_id=0)
    return character_tokenizer().decode(output[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("model", [llama, mistral], ids=["full attention", "sliding windows"])
@pytest.mark.parametrize("cache", [{}, {"offload": None, "max_cache_len": 2000}])
def test_each_turn_is_answered_as_the_whole_conversation_would_be(model, cache):
    talk = conversation(model(), cache=cache)
    for prompt in PROMPTS:
        answer = talk.answer(prompt, nothing)
        assert answer.text == alone(model(), talk.messages[:-1])
        assert talk.messages[-2:] == [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": answer.text},
        ]


def test_a_turn_computes_its_new_tokens_alone():
    talk = conversation()
    first = talk.answer(PROMPTS[0], nothing)
    assert first.computed_tokens == first.prompt_tokens
    second = talk.answer(PROMPTS[1], nothing)
    # The answer's last token was not fed to the model yet.
    between = second.prompt_tokens - first.prompt_tokens - first.new_tokens
    assert second.computed_tokens == between + 1
    assert talk.cache.get_seq_length() == second.prompt_tokens + second.new_tokens - 1


def test_what_a_template_renders_anew_is_computed_anew(monkeypatch):
    talk = conversation()
    talk.answer(PROMPTS[0], nothing)
    talk.messages[-1]["content"] = "Something else"
    second = talk.answer(PROMPTS[1], nothing)
    assert second.text == alone(llama(), talk.messages[:-1])
    assert 0 < second.computed_tokens < second.prompt_tokens


def test_a_window_that_cannot_be_cropped_is_computed_anew():
    talk = conversation(mistral())
    talk.answer(PROMPTS[0], nothing)
    talk.messages[-1]["content"] = "Something else"
    second = talk.answer(PROMPTS[1], nothing)
    assert second.computed_tokens == second.prompt_tokens
    assert second.text == alone(mistral(), talk.messages[:-1])


def test_without_a_template_the_text_goes_on(monkeypatch):
    monkeypatch.setattr(character_tokenizer(), "chat_template", None)
    talk = conversation()
    first = talk.answer("One, two", nothing)
    second = talk.answer(", three", nothing)
    ids = character_tokenizer()(f"One, two{first.text}, three", return_tensors="pt")["input_ids"]
    output = llama().generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=0)
    assert second.text == character_tokenizer().decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert second.computed_tokens == len(", three") + 1
    with pytest.raises(ValueError, match="system: expected None"):
        conversation(system="Be short.")


def test_what_is_shown_is_the_answer_as_it_comes():
    shown = []
    answer = conversation(max_new_tokens=40).answer(PROMPTS[0], shown.append)
    assert "".join(shown) == answer.text
    assert answer.finish_reason == "length"
    assert answer.new_tokens == 40
    assert answer.tokens_per_second > 0 < answer.first_token_seconds


def test_stopping_leaves_the_cache_whole():
    talk = conversation(max_new_tokens=500)
    shown = []

    def stop_soon(text):
        shown.append(text)
        if len(shown) == 5:
            talk.stop()

    first = talk.answer(PROMPTS[0], stop_soon)
    assert first.finish_reason == "interrupted"
    assert first.new_tokens < 100
    talk.max_new_tokens = 12
    second = talk.answer(PROMPTS[1], nothing)
    assert second.computed_tokens < second.prompt_tokens - first.new_tokens
    assert second.text == alone(llama(), talk.messages[:-1])


def test_a_turn_that_fails_in_the_midst_is_forgotten():
    talk = conversation()
    talk.answer(PROMPTS[0], nothing)
    said = list(talk.messages)

    def fails(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.answer(PROMPTS[1], fails)
    assert talk.messages == said
    third = talk.answer(PROMPTS[2], nothing)
    assert third.computed_tokens == third.prompt_tokens
    assert third.text == alone(llama(), talk.messages[:-1])


def test_a_conversation_that_is_too_long_is_refused_and_goes_on():
    talk = conversation(cache={"max_cache_len": 60})
    first = talk.answer("Hello", nothing)
    with pytest.raises(ValueError, match="less than 60 tokens"):
        talk.answer("x" * 60, nothing)
    assert talk.answer("Hi", nothing).prompt_tokens > first.prompt_tokens
    talk.reset()
    assert talk.answer("Hello", nothing).text == first.text


def test_a_saved_conversation_goes_on_in_another(tmp_path):
    talk = conversation(cache={"quantization": "int8", "block_size": 8})
    talk.answer(PROMPTS[0], nothing)
    talk.save(tmp_path / "talk.safetensors")
    expected = talk.answer(PROMPTS[1], nothing)
    other = conversation()
    other.load(tmp_path / "talk.safetensors")
    answer = other.answer(PROMPTS[1], nothing)
    assert (answer.text, answer.computed_tokens) == (expected.text, expected.computed_tokens)
    with pytest.raises(OSError, match="missing"):
        other.load(tmp_path / "missing")
    assert len(other.messages) == 4


def test_sampling_follows_its_seed():
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(conversation(temperature=2.0).answer(PROMPTS[0], nothing).text)
    assert texts[0] == texts[1] != texts[2]


def typed(monkeypatch, *lines):
    """What `input` gives: lines, and interruptions."""
    waiting = list(lines)

    def next_line(prompt):
        line = waiting.pop(0) if waiting else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", next_line)


def test_the_commands_of_a_chat(monkeypatch, capsys, tmp_path):
    file = tmp_path / "talk.safetensors"
    typed(
        monkeypatch,
        "/save " + str(file),
        KeyboardInterrupt(),
        PROMPTS[0],
        "/memory",
        "/stats",
        f"/save {file}",
        "/reset",
        f"/load {file}",
        "/load",
        f"/load {tmp_path / 'none'}",
        "/nonsense",
        "/help",
    )
    talk = conversation()
    chat(talk)
    printed = capsys.readouterr().out
    for expected in (
        "nothing has been said yet",
        "(Ctrl-D leaves)",
        "of full precision",
        "CacheStats(",
        "/load: expected a file",
        "/nonsense is no command",
        "Ctrl-C stops an answer",
    ):
        assert expected in printed
    assert talk.messages[0]["content"] == PROMPTS[0]
    assert printed.count("done") == 3
    typed(monkeypatch, "/quit", PROMPTS[0])
    chat(talk)
    assert len(talk.messages) == 2


def test_a_loaded_conversation_lies_where_this_one_was_asked_to(tmp_path):
    offload = OffloadConfig({"cpu": "1MB"})
    talk = conversation(cache={"offload": offload, "quantization": "int8"})
    talk.answer(PROMPTS[0], nothing)
    talk.save(tmp_path / "talk")
    talk.reset()
    talk.load(tmp_path / "talk")
    assert talk.cache.options.offload == offload
    # What an interrupted turn left: all of the ids, and nothing in the cache.
    talk.cache.reset()
    talk.save(tmp_path / "talk")
    talk.load(tmp_path / "talk")
    answer = talk.answer(PROMPTS[1], nothing)
    assert answer.computed_tokens == answer.prompt_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    llama().save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return str(path)


def test_a_single_answer_is_printed_or_given_as_json(folder, capsys, tmp_path):
    arguments = ["generate", "--model", folder, "--prompt", PROMPTS[0], "--temperature", "0", "--max-new-tokens", "20"]
    main(arguments)
    printed = capsys.readouterr().out
    assert printed.strip()
    main([*arguments, "--quantization", "int8", "--block-size", "8", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["new_tokens"], report["finish_reason"]) == (20, "length")
    assert report["memory"]["used_bytes"] == report["memory"]["by_device"]["cpu"]["used_bytes"] > 0
    main([*arguments, "--json", str(tmp_path / "answer.json")])
    assert json.loads((tmp_path / "answer.json").read_text())["text"] + "\n" == printed == capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--quantization", "int4"], {"quantization": "int4"}),
        (["--offload", "1MiB", "--block-size", "16", "--active-blocks", "2"], {"block_size": 16}),
        (["--static", "--max-cache-len", "300"], {"static": True, "max_cache_len": 300}),
        (["--fused-attention", "--initial-capacity", "64"], {"fused_attention": True, "initial_capacity": 64}),
    ],
)
def test_flags_are_options_of_the_cache(folder, capsys, monkeypatch, arguments, options):
    made = []
    original = MemOSCache.for_model.__func__

    def remembers(cls, model, **given):
        made.append(given)
        return original(cls, model, **given)

    monkeypatch.setattr(MemOSCache, "for_model", classmethod(remembers))
    main(["generate", "--model", folder, "--prompt", "x" * 100, "--max-new-tokens", "5", *arguments])
    offload = made[0].pop("offload", None)
    assert made == [options]
    assert ("--offload" in arguments) == (offload is not None)
    if offload is not None:
        assert (offload.max_memory, offload.active_blocks) == ({"cpu": 1 << 20}, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json"], "--json: expected with --prompt"),
        (["--prompt", ""], "--prompt: expected some text"),
        (["--prompt", "x", "--static"], "static=True: expected max_cache_len"),
        (["--prompt", "x", "--static", "--max-cache-len", "9", "--quantization", "int8"], "cannot be combined"),
        (["--prompt", "x", "--offload", "lots"], "expected bytes or a size such as 24GiB"),
        (["--prompt", "x", "--offload", "gpu=1GiB"], "expected the index of an accelerator"),
        (["--prompt", "x", "--active-blocks", "2"], "expected with offload"),
        (["--prompt", "x", "--block-size", "12"], "block_size: expected a power of two"),
    ],
)
def test_arguments_that_mean_nothing_are_usage_errors(folder, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with pytest.raises(SystemExit) as left:
        main(["generate", "--model", folder, *arguments])
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_model_that_is_not_there_is_said_in_a_line(tmp_path):
    with pytest.raises(SystemExit, match=r"^generate: [^\n]+$"):
        main(["generate", "--model", str(tmp_path / "none"), "--prompt", "x"])


def test_what_is_piped_in_is_answered_and_nothing_else_is_printed(folder):
    command = [sys.executable, "-m", "memos_hf", "generate", "--model", folder, "--json", "--max-new-tokens", "5"]
    done = subprocess.run(command, input="What?\n", capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["prompt"] == "What?"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_chat_at_a_real_terminal_survives_ctrl_c_and_ends_with_ctrl_d(folder):
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "memos_hf", "generate", "--model", folder, "--max-new-tokens", "3000"]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, preexec_fn=_own_terminal
    )
    os.close(slave)
    try:
        _await(master, r"> $")
        os.write(master, b"What is a cache?\n")  # the answer to which takes seconds
        _await(master, r"cache\?.*\n.{20,}")
        os.write(master, b"\x03")
        _await(master, r"\(stopped\)\s+> $")
        os.write(master, b"/memory\n")
        _await(master, r"of full precision.*> $")
        os.write(master, b"\x04")
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


def _own_terminal():
    """Make the standard input the terminal whose Ctrl-C this process gets."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _await(master, pattern, seconds=90):
    """Read until what came matches."""
    seen, end = "", time.monotonic() + seconds
    while not re.search(pattern, seen, re.DOTALL):
        ready, _, _ = select.select([master], [], [], max(end - time.monotonic(), 0))
        assert ready, seen
        seen += os.read(master, 4096).decode(errors="replace")
        seen = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", seen)
    return seen
