"""A needle in a haystack: whether the model still finds one fact in a long context."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from .caches import REFERENCE, CacheFactory, bytes_ratio, with_reference
from .model_calls import check_at_least_one, next_log_probs
from .text import first_ids

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_BOUNDARY = re.compile(r"(?<=[.!?。！？])\s+|\n+")


@dataclass(frozen=True)
class Fact:
    """What is hidden, what is asked, and what the answer must contain."""

    sentence: str
    question: str
    answer: str


# Short and plain, so that a model of 135M parameters finds it in 4,000 tokens.
MAGIC_NUMBER = Fact("The magic number of Lisbon is 74219.", "What is the magic number of Lisbon?", "74219")


@dataclass
class Needle:
    """One cache asked for the fact at one depth.

    Attributes
    ----------
    cache : str
    tokens : int
        Of the haystack.
    depth : float
        Where in the haystack the fact is, 0 at the beginning, 1 at the end.
    found : bool
        Whether the answer contains what it must.
    answer : str
        What the model said.
    ratio : float, optional
        Bytes used over full precision at the end; `None` for caches that do not report it.
    """

    cache: str
    tokens: int
    depth: float
    found: bool
    answer: str
    ratio: float | None = None

    def row(self) -> dict[str, Any]:
        """What a table or a JSON file shows."""
        return {
            "cache": self.cache,
            "tokens": self.tokens,
            "depth": self.depth,
            "found": self.found,
            "answer": self.answer,
            "bytes": self.ratio,
        }


def needle(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    caches: Mapping[str, CacheFactory],
    *,
    tokens: int = 2000,
    depths: Sequence[float] = DEPTHS,
    fact: Fact = MAGIC_NUMBER,
    answer_tokens: int = 24,
    chunk: int = 256,
    progress: bool = True,
) -> list[Needle]:
    """Hide a fact in a text, ask for it at the end, and see whether the greedy answer has it.

    The prompt is a turn of a chat if the tokenizer has a chat template. It is fed in chunks and the question in a call
    of its own, so that what answers it is what the cache stored, but for the newest tokens that a cache keeps exact.

    Parameters
    ----------
    model : PreTrainedModel
    tokenizer : PreTrainedTokenizerBase
    text : str
        The haystack is its first `tokens` tokens.
    caches : mapping of str to callable
        Makes an empty cache for each name.
    tokens : int
    depths : sequence of float
        0 to 1; the fact is put before the next sentence or line.
    fact : Fact
    answer_tokens : int
        Longest answer.
    chunk : int
        Tokens in one call of the model.
    progress : bool
        Show a progress bar.

    Returns
    -------
    list[Needle]
        For each depth DynamicCache first, then one for each entry of `caches`, in their order.

    Raises
    ------
    ValueError
        If the text is too short, it has the answer in it, or a number is out of its range.
    """
    check_at_least_one(tokens=tokens, answer_tokens=answer_tokens, chunk=chunk)
    if not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"depths: expected numbers from 0 to 1, got {tuple(depths)}")
    ids = first_ids(tokenizer, text, tokens)[0]
    haystack = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if fact.answer in haystack:
        raise ValueError(f"fact: expected an answer that is not in the text already, got {fact.answer!r}")
    factories = with_reference(model, caches)
    results = []
    with tqdm(total=len(depths) * len(factories), desc=f"needle in {tokens}", disable=not progress) as done:
        for depth in depths:
            context, question = _prompt(tokenizer, _hide(fact.sentence, haystack, depth), fact.question)
            for name, make in factories.items():
                cache = make()
                answer = _answer(model, tokenizer, cache, context, question, answer_tokens, chunk)
                results.append(Needle(name, tokens, depth, fact.answer in answer, answer, bytes_ratio(cache)))
                done.update()
    return results


def found_by_depth(results: Iterable[Needle]) -> list[dict[str, Any]]:
    """One row for each cache and haystack, with a column for each depth: whether the fact was found.

    The last column, "kept", counts the depths at which it was among those at which DynamicCache led to it.
    """
    by_place = {(result.tokens, result.cache, result.depth): result.found for result in results}
    depths = sorted({depth for _, _, depth in by_place})
    rows = []
    for tokens, cache in dict.fromkeys((tokens, cache) for tokens, cache, _ in by_place):
        expected = [depth for depth in depths if by_place.get((tokens, REFERENCE, depth))]
        kept = sum(bool(by_place.get((tokens, cache, depth))) for depth in expected)
        found = {f"{depth:g}": by_place.get((tokens, cache, depth)) for depth in depths}
        rows.append({"cache": cache, "tokens": tokens, **found, "kept": f"{kept} of {len(expected)}"})
    return rows


def _hide(sentence: str, haystack: str, depth: float) -> str:
    """The haystack with a paragraph more, before the sentence or line that begins next after `depth`."""
    cut = int(len(haystack) * depth)
    boundary = _BOUNDARY.search(haystack, cut) if 0 < depth < 1 else None
    cut = boundary.end() if boundary else cut
    return "\n\n".join(part for part in (haystack[:cut].strip(), sentence, haystack[cut:].strip()) if part)


def _prompt(tokenizer: PreTrainedTokenizerBase, context: str, question: str) -> tuple[Tensor, Tensor]:
    """Ids of the prompt up to the question and from it on, both `[1, tokens]`."""
    if tokenizer.chat_template is not None:
        turn = [{"role": "user", "content": f"{context}\n\n{question}"}]
        prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    else:
        prompt = f"{context}\n\nQuestion: {question}\nAnswer:"
    before, _, after = prompt.rpartition(question)
    # A template writes the special tokens itself.
    special = tokenizer.chat_template is None
    return (
        tokenizer(before, add_special_tokens=special, return_tensors="pt").input_ids,
        tokenizer(question + after, add_special_tokens=False, return_tensors="pt").input_ids,
    )


def _answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: Cache,
    context: Tensor,
    question: Tensor,
    answer_tokens: int,
    chunk: int,
) -> str:
    """The greedy answer, up to the end of sequence."""
    generated: list[int] = []
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    with torch.inference_mode():
        next_log_probs(model, cache, context.to(model.device), chunk=chunk)
        following = question.to(model.device)
        for _ in range(answer_tokens):
            following = next_log_probs(model, cache, following, chunk=chunk).argmax(-1, keepdim=True)
            if int(following) in ends:
                break
            generated.append(int(following))
    answer: str = tokenizer.decode(generated, skip_special_tokens=True)
    return answer.strip()
