"""Many conversations on one memory budget: idle ones are moved out of memory and come back with their next question.

Each conversation reads a text of its own. Then questions come to them in random order, and what a cache knows is never
computed again. Every answer is compared with a DynamicCache's that has the conversation for itself:

    python examples/conversations.py --conversations 20 --tokens 2000 --fit 5
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from command_line import add_model_options, model_from, parser_for, write_json
from compare_dynamic_cache import example_text
from long_context import MIB, memory_bytes
from torch import Tensor
from tqdm.auto import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from memos_hf import MemoryBudget, MemOSCache, OffloadConfig
from memos_hf.arguments import count, output_file, positive_int
from memos_hf.bench.decode import Decoder
from memos_hf.bench.memory import anonymous_bytes
from memos_hf.bench.timing import synchronize
from memos_hf.contenders import Room

QUESTIONS = (
    "\n\nQuestion: Which of these things was mentioned first, and what was said about it?\nAnswer:",
    "\n\nQuestion: Which words of the text above does a beginner have to know, and why?\nAnswer:",
    "\n\nQuestion: What is the most surprising thing that the text above says?\nAnswer:",
)
# Tokens of a question, at most, for the budget and the model's positions.
QUESTION_ROOM = 32


@dataclass
class Conversation:
    """A text, a cache that has read it, and the answers so far.

    Attributes
    ----------
    first_s : list of float
        Seconds from each question to the first token of its answer.
    """

    decoder: Decoder
    answers: list[list[int]] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)

    def read(self, ids: Tensor) -> float:
        """Take the text in; seconds to the token that would follow."""
        return self._timed(ids)

    def ask(self, question: Tensor, new_tokens: int) -> None:
        """Put a question, and decode the answer."""
        if self.answers:  # the answer's last token has not been fed
            assert self.decoder.next_ids is not None
            question = torch.cat([self.decoder.next_ids, question], dim=1)
        self.first_s.append(self._timed(question))
        answer = [int(self.decoder.next_ids)]
        for _ in range(new_tokens - 1):
            self.decoder.step()
            answer.append(int(self.decoder.next_ids))
        self.answers.append(answer)

    def _timed(self, ids: Tensor) -> float:
        start = time.perf_counter()
        self.decoder.feed(ids)
        synchronize(ids.device)
        return time.perf_counter() - start


@dataclass
class Meeting:
    """What all conversations together did.

    Attributes
    ----------
    memory_bytes : int
        The most that all caches had in memory after a turn.
    process_bytes : int
        By how much the anonymous memory of the process had grown after the last turn.
    """

    conversations: list[Conversation]
    memory_bytes: int = 0
    process_bytes: int = 0
    files: int = 0
    disk_bytes: int = 0
    files_left: int = 0
    hits: int = 0
    misses: int = 0

    def look(self, budget: MemoryBudget) -> None:
        """Note what is in memory now."""
        held = sum(memory_bytes(conversation.decoder.cache) for conversation in self.conversations)
        # Every cache reports the buffers that all on the budget share.
        held -= (len(self.conversations) - 1) * sum(tensor.nbytes for tensor in budget.staging_tensors())
        self.memory_bytes = max(self.memory_bytes, held)

    def close(self, folder: Path) -> None:
        """Keep the figures and let all caches go."""
        stats = [conversation.decoder.cache.stats for conversation in self.conversations]
        self.hits, self.misses = sum(one.hits for one in stats), sum(one.misses for one in stats)
        sizes = [file.stat().st_size for file in folder.iterdir()]
        self.files, self.disk_bytes = len(sizes), sum(sizes)
        for conversation in self.conversations:
            del conversation.decoder
        del stats
        anonymous_bytes()  # collects what is left in cycles
        self.files_left = len(list(folder.iterdir()))


Turns = list[tuple[int, Tensor]]
Item = TypeVar("Item")


def progress(items: Sequence[Item], title: str) -> Iterable[Item]:
    """The items behind a progress bar, on a terminal."""
    bar: Iterable[Item] = tqdm(items, desc=title, disable=not sys.stderr.isatty())
    return bar


def hold(model: PreTrainedModel, texts: list[Tensor], turns: Turns, new_tokens: int, budget: int) -> Meeting:
    """All conversations on one budget of bytes, in the order of `turns`."""
    place: int | str = model.device.type if model.device.type in ("cpu", "mps") else model.device.index or 0
    shared = MemoryBudget({place: budget})
    before = anonymous_bytes()
    with tempfile.TemporaryDirectory() as folder:

        def empty() -> Cache:
            return MemOSCache(model.config, offload=OffloadConfig(shared, offload_folder=folder))

        meeting = Meeting([Conversation(Decoder(model, empty())) for _ in texts])
        for conversation, ids in progress(list(zip(meeting.conversations, texts, strict=True)), "reading"):
            conversation.read(ids)
            meeting.look(shared)
        for index, question in progress(turns, "turns"):
            meeting.conversations[index].ask(question, new_tokens)
            meeting.look(shared)
        meeting.process_bytes = anonymous_bytes() - before
        meeting.close(Path(folder))
    return meeting


def hold_alone(
    model: PreTrainedModel, texts: list[Tensor], turns: Turns, new_tokens: int
) -> tuple[list[Conversation], list[float]]:
    """Each conversation on a DynamicCache of its own, one after the other; and seconds to read each text."""
    conversations, seconds = [], []
    for index, ids in progress(list(enumerate(texts)), "alone, on DynamicCache"):
        conversation = Conversation(Decoder(model, DynamicCache(config=model.config)))
        seconds.append(conversation.read(ids))
        for asked, question in turns:
            if asked == index:
                conversation.ask(question, new_tokens)
        del conversation.decoder
        conversations.append(conversation)
    return conversations, seconds


def figures(meeting: Meeting, alone: list[Conversation], prefill_s: list[float]) -> dict[str, Any]:
    """What is printed and written."""
    first_s = [seconds for conversation in meeting.conversations for seconds in conversation.first_s]
    answers = [answer for conversation in meeting.conversations for answer in conversation.answers]
    expected = [answer for conversation in alone for answer in conversation.answers]
    return {
        "first_token_s": {"median": median(first_s), "max": max(first_s), "all": first_s},
        "prefill_s": {"median": median(prefill_s), "all": prefill_s},
        "first_token_of_prefill": median(first_s) / median(prefill_s),
        "answers": len(answers),
        "same_answers": sum(one == other for one, other in zip(answers, expected, strict=True)),
        **{name: value for name, value in vars(meeting).items() if name != "conversations"},
    }


def say_figures(found: dict[str, Any], full: int, budget: int) -> None:
    first, again = found["first_token_s"], found["prefill_s"]["median"]
    print(f"first token of a returning turn: median {first['median']:.2f} s, at most {first['max']:.2f} s")
    print(f"reading everything again: median {again:.2f} s; a returning turn takes {first['median'] / again:.3f} of it")
    print(f"in memory at most {found['memory_bytes'] / MIB:.0f} MiB, the budget {budget / MIB:.0f} MiB, ", end="")
    print(f"all conversations {full / MIB:.0f} MiB; the process grew by {found['process_bytes'] / MIB:.0f} MiB")
    print(f"blocks found in memory {found['hits']:,}, read from below {found['misses']:,}")
    print(f"{found['files']} files with {found['disk_bytes'] / MIB:.0f} MiB; {found['files_left']} are left afterwards")
    print(f"{found['same_answers']} of {found['answers']} answers are those of a DynamicCache of its own")


def texts_for(tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> list[Tensor]:
    """A text for each conversation, `[1, tokens]` each."""
    ids = example_text(tokenizer, options.conversations * options.tokens).to(options.device)
    return list(ids.split(options.tokens, dim=1))


def turns_for(tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> Turns:
    """Which conversation is asked what, in an order that the seed decides."""
    questions = [
        tokenizer(question, add_special_tokens=False, return_tensors="pt").input_ids.to(options.device)
        for question in QUESTIONS
    ]
    order = [index for index in range(options.conversations) for _ in range(options.turns)]
    random.Random(options.seed).shuffle(order)
    return [(index, questions[turn % len(questions)]) for turn, index in enumerate(order)]


def parsed_options() -> argparse.Namespace:
    parser = parser_for(__doc__)
    add_model_options(parser)
    parser.add_argument("--conversations", type=positive_int, default=8, help="how many (%(default)s)")
    parser.add_argument("--tokens", type=positive_int, default=1000, help="of each one's text (%(default)s)")
    parser.add_argument("--fit", type=positive_int, default=2, help="conversations that the budget holds (%(default)s)")
    parser.add_argument("--turns", type=positive_int, default=2, help="questions to each (%(default)s)")
    parser.add_argument("--new-tokens", type=positive_int, default=4, help="of each answer (%(default)s)")
    parser.add_argument("--seed", type=count, default=0, help="of the order (%(default)s)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures")
    return parser.parse_args()


def main() -> None:
    options = parsed_options()
    model, tokenizer = model_from(options)
    needed = options.tokens + options.turns * (QUESTION_ROOM + options.new_tokens)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and needed > positions:
        raise SystemExit(f"--tokens, --turns: {needed} tokens are needed, the model has {positions} positions")
    one = Room(needed, 1, model.device, model.dtype).full_bytes(model.config)
    budget, full = options.fit * one, options.conversations * one
    texts, turns = texts_for(tokenizer, options), turns_for(tokenizer, options)
    with torch.inference_mode():
        meeting = hold(model, texts, turns, options.new_tokens, budget)
        alone, prefill_s = hold_alone(model, texts, turns, options.new_tokens)
    found = figures(meeting, alone, prefill_s)
    print(f"{options.conversations} conversations of {options.tokens:,} tokens, {len(turns)} turns in random order\n")
    say_figures(found, full, budget)
    settings = {name: getattr(options, name) for name in ("conversations", "tokens", "fit", "turns", "new_tokens")}
    write_json(options.json, {**settings, "seed": options.seed, "budget": budget, **found})
    if found["same_answers"] < found["answers"] or found["files_left"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
