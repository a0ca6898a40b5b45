"""Commands of memos_hf: `python -m memos_hf COMMAND`."""

from __future__ import annotations

import argparse

from .advise.command import add_command as add_advise
from .bench.command import add_command as add_bench
from .evaluate.command import add_command as add_eval
from .store.command import add_command as add_inspect


def main(arguments: list[str] | None = None) -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="python -m memos_hf", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add_advise(commands)
    add_eval(commands)
    add_bench(commands)
    add_inspect(commands)
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
