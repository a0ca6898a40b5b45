"""The command line as a whole: what it prints, what it exits with, and that every option says what it is."""

import argparse
import subprocess
import sys

import pytest
from tiny import llama

import memos_hf
from memos_hf import __main__ as command_line
from memos_hf.__main__ import main
from memos_hf.advise.command import add_command as add_advise
from memos_hf.bench.command import add_command as add_bench
from memos_hf.chat.command import add_command as add_generate
from memos_hf.evaluate.command import add_command as add_eval
from memos_hf.store.command import add_command as add_inspect

COMMANDS = {
    "generate": add_generate,
    "advise": add_advise,
    "bench": add_bench,
    "eval": add_eval,
    "inspect": add_inspect,
}
REQUIRED = {
    "bench": ["--shape", "smollm2-135m"],
    "eval": ["--model", "m", "--text", "t"],
    "advise": ["--model", "m", "--context", "9", "--memory", "9"],
    "generate": ["--model", "m"],
    "inspect": ["file"],
}


def parser_of(name):
    commands = argparse.ArgumentParser().add_subparsers()
    COMMANDS[name](commands)
    return commands.choices[name]


def test_without_a_command_help_is_printed(capsys):
    main([])
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)
    assert "exit codes" in printed


def test_the_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"memos_hf {memos_hf.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_is_and_what_it_is_without(name):
    parser = parser_of(name)
    assert f"python -m memos_hf {name}" in parser.format_help()
    chosen_among = {action for group in parser._mutually_exclusive_groups for action in group._group_actions}
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        assert action.help, action.option_strings
        takes_a_value = action.option_strings and action.nargs != 0
        if (
            takes_a_value
            and not action.required
            and action not in chosen_among
            and not set(action.option_strings)
            & {
                "--json",
                "--png",
            }
        ):
            assert action.help.endswith(")"), (action.option_strings, "no default in its help")


@pytest.mark.parametrize("name", COMMANDS)
def test_unknown_options_are_usage_errors(name, capsys):
    with pytest.raises(SystemExit) as left:
        main([name, *REQUIRED[name], "--nonsense"])
    assert left.value.code == 2
    assert "--nonsense" in capsys.readouterr().err


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("memos_hf.store.command.describe", interrupted)
    with pytest.raises(SystemExit) as left:
        main(["inspect", "file"])
    assert left.value.code == command_line.INTERRUPTED


def test_a_file_that_is_not_there_is_one_line_on_standard_error_and_exit_code_1(tmp_path):
    command = [sys.executable, "-m", "memos_hf", "inspect", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("inspect: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_a_reader_that_leaves_and_a_full_disk_leave_no_traceback(tmp_path):
    llama().config.save_pretrained(tmp_path)
    command = f"{sys.executable} -m memos_hf advise --model {tmp_path} --context 100 --memory 1GiB"
    done = subprocess.run(f"{command} | true", shell=True, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    done = subprocess.run(f"{command} > /dev/full", shell=True, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("memos_hf: ") and "No space left" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--prompt", "\udcff"], ["--prompt", "hi", "--device", "nowhere"]])
def test_a_prompt_or_device_that_means_nothing_is_said_in_a_line(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(["generate", "--model", "m", *arguments])
    message = left.value.code if isinstance(left.value.code, str) else capsys.readouterr().err
    assert "expected text in UTF-8" in message or "'nowhere' cannot be used here" in message
