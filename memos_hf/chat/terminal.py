"""A conversation at a terminal: a prompt, answers as they come, and commands that begin with a slash."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..output import in_one_line
from .conversation import Answer, Conversation

PROMPT = "> "
HELP = """\
/memory       bytes that the cache holds
/stats        what it did
/save FILE    save it, and the conversation
/load FILE    go on with a saved one
/reset        forget the conversation
/quit         leave; so does Ctrl-D
Ctrl-C stops an answer; twice, at once."""


def chat(conversation: Conversation) -> None:
    """Talk until the user leaves."""
    with suppress(ImportError):
        import readline  # noqa: F401  gives `input` a history
    print("/help says what else there is.")
    while True:
        try:
            line = input(PROMPT).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("  (Ctrl-D leaves)")
            continue
        if line == "/quit":
            return
        if line:
            _take(conversation, line)


def _take(conversation: Conversation, line: str) -> None:
    """One line: a command, or a turn. What goes wrong is said, and the conversation goes on."""
    try:
        if line.startswith("/"):
            _command(conversation, line)
        else:
            with stopped_by_ctrl_c(conversation):
                answer = conversation.answer(line, show)
            print(_ending(answer))
    except KeyboardInterrupt:
        print("\n(stopped; what was said so far is computed anew at the next turn)")
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        print(in_one_line(error))


def _command(conversation: Conversation, line: str) -> None:
    name, _, argument = line.partition(" ")
    without: dict[str, Callable[[], Any]] = {
        "/help": lambda: HELP,
        "/memory": conversation.cache.memory,
        "/stats": lambda: conversation.cache.stats,
        "/reset": conversation.reset,
    }
    with_file = {"/save": conversation.save, "/load": conversation.load}
    if name in with_file:
        if not argument.strip():
            raise ValueError(f"{name}: expected a file")
        with_file[name](Path(argument.strip()).expanduser())
        print("done")
    elif name in without:
        shown = without[name]()
        print("done" if shown is None else shown)
    else:
        raise ValueError(f"{name} is no command; /help shows those there are")


def show(text: str) -> None:
    """Print a piece of an answer at once."""
    print(text, end="", flush=True)


def _ending(answer: Answer) -> str:
    """What ends the line of an answer."""
    if answer.finish_reason == "stop":
        return ""
    stopped = answer.finish_reason == "interrupted"
    return " … (stopped)" if stopped else " … (--max-new-tokens, or the context, allow no more)"


@contextmanager
def stopped_by_ctrl_c(conversation: Conversation) -> Iterator[None]:
    """Meanwhile Ctrl-C ends the answer between two tokens, which leaves the cache whole; a second one raises."""

    def stop(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        conversation.stop()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
