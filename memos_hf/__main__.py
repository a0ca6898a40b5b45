"""Commands of memos_hf: `python -m memos_hf COMMAND`."""

from __future__ import annotations

import argparse
import os
import sys

from transformers.utils.logging import disable_progress_bar

from . import __version__
from .advise.command import add_command as add_advise
from .bench.command import add_command as add_bench
from .chat.command import add_command as add_generate
from .evaluate.command import add_command as add_eval
from .output import in_one_line
from .store.command import add_command as add_inspect

EXIT_CODES = "exit codes: 0 all went well; 1 it failed, and standard error says why; 2 the arguments mean nothing"
# As shells have it of a program that Ctrl-C ended.
INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> None:
    """Run one command; without any, print what there is."""
    parser = argparse.ArgumentParser(
        prog="python -m memos_hf",
        description="A KV cache for Hugging Face Transformers: talk to a model through it, see what fits, measure.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"memos_hf {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (add_generate, add_advise, add_bench, add_eval, add_inspect):
        add(commands)
    options = parser.parse_args(arguments)
    if "run" not in options:
        parser.print_help()
        return
    if not sys.stderr.isatty():
        disable_progress_bar()  # of loading weights, and of what is fetched from the hub
    try:
        options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:  # whoever read has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the interpreter still flushes
        raise SystemExit(1) from None
    except OSError as error:  # of a disk that is full, say
        raise SystemExit(f"memos_hf: {in_one_line(error)}") from None


if __name__ == "__main__":
    main()
