"""Answers to every prompt of a data set, in batches, on one process or several.

Prompts come from a text file (one a line), a JSON or JSON-lines file (one field of each record), or a made-up list.
What they begin with in common is computed once. Answers go to a JSON-lines file in the order of the prompts; a run that
was cut off goes on where it was, from the parts beside that file, one for each process:

    python examples/batch_dataset.py --prompts questions.txt --limit 20 --output answers.jsonl
    accelerate launch --multi_gpu --num_processes 2 examples/batch_dataset.py --prompts q.json --column question

On a machine without GPUs too it is `--multi_gpu` that makes accelerate start several processes. With `--prefixes` they
keep what they have read in one folder, or behind one URL, and find it there the next time, on other machines too.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import gather_object
from command_line import add_model_options, model_from, parser_for

from memos_hf import BatchOutput, PrefixStore, generate_batch
from memos_hf.arguments import output_file, positive_int

INSTRUCTION = "Answer in one short sentence, and say nothing about yourself. The question: "
PLACES = ("France", "Kenya", "Peru", "Japan", "Norway", "Egypt", "Canada", "Vietnam")
QUESTIONS = ("What is the capital of {}?", "Which languages are spoken in {}?", "Name a river in {}.")


def load_prompts(path: Path | None, column: str) -> list[str]:
    """The prompts in a file, read by `datasets`; without a file, a list of questions that begin alike."""
    if path is None:
        return [INSTRUCTION + question.format(place) for place in PLACES for question in QUESTIONS]
    from datasets import load_dataset

    kind = "text" if path.suffix == ".txt" else "json"
    data = load_dataset(kind, data_files=str(path), split="train")
    if column not in data.column_names:
        raise SystemExit(f"--column: {path} has {', '.join(data.column_names)}, not {column}")
    return list(data[column])


def answers_of(options: argparse.Namespace, state: PartialState, prompts: list[str]) -> list[BatchOutput]:
    """The answers to all prompts, in their order, to which each process has contributed its share."""
    model, tokenizer = model_from(options)
    store = PrefixStore(model, options.prefixes) if options.prefixes is not None else None
    with state.split_between_processes(list(enumerate(prompts))) as share:
        part = f"{options.output.name}.part-{state.process_index + 1}-of-{state.num_processes}"
        outputs = generate_batch(
            model,
            tokenizer,
            [prompt for _, prompt in share],
            batch_size=options.batch_size,
            progress=state.is_main_process,
            max_new_tokens=options.max_new_tokens,
            do_sample=False,
            prefix_store=store,
            output_file=options.output.with_name(part),
        )
        numbered = [replace(output, index=index) for (index, _), output in zip(share, outputs, strict=True)]
    return sorted(gather_object(numbered), key=lambda output: output.index)


def parse_options() -> argparse.Namespace:
    parser = parser_for(__doc__)
    add_model_options(parser)
    parser.add_argument("--prompts", type=Path, help="a .txt, .json or .jsonl file (default: a made-up list)")
    parser.add_argument("--column", default="text", help="field of a record with the prompt (%(default)s)")
    parser.add_argument("--limit", type=positive_int, help="take so many prompts")
    parser.add_argument("--batch-size", type=positive_int, default=8, help="rows in a batch (%(default)s)")
    parser.add_argument("--max-new-tokens", type=positive_int, default=32, help="length of an answer (%(default)s)")
    parser.add_argument("--prefixes", metavar="FOLDER_OR_URL", help="where all processes keep shared prefixes")
    parser.add_argument(
        "--output", type=output_file, default=Path("answers.jsonl"), help="where answers go (%(default)s)"
    )
    options = parser.parse_args()
    if options.prompts is not None and not options.prompts.is_file():
        parser.error(f"--prompts: there is no file {options.prompts}")
    return options


def main() -> None:
    options = parse_options()
    state = PartialState(cpu=options.device.type == "cpu")
    if state.num_processes > 1:
        options.device = state.device
    prompts = load_prompts(options.prompts, options.column)[: options.limit]

    start = time.perf_counter()
    outputs = answers_of(options, state, prompts)
    seconds = time.perf_counter() - start
    if state.is_main_process:
        with options.output.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(output), ensure_ascii=False) + "\n" for output in outputs)
        for output in outputs[:3]:
            print(f"{output.prompt}\n    {output.error or output.text.strip()}")
        tokens = sum(output.new_tokens for output in outputs)
        failed = sum(output.error is not None for output in outputs)
        print(f"{len(outputs)} prompts ({failed} failed), {tokens} new tokens in {seconds:.1f} s, loading included")
        print(f"{state.num_processes} process(es); written: {options.output}")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
