"""What is asked and what comes back: prompts of every accepted kind as token ids, each checked by itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class BatchOutput:
    """What became of one request.

    Attributes
    ----------
    index : int
        Place of its prompt among the prompts.
    prompt : str, list of messages or list of int
        As it was given.
    text : str
        `token_ids` decoded, without special tokens. A stop string at the end is part of it, as it is in `generate`.
    token_ids : list[int]
        Generated ids, up to and with the end-of-sequence token; no padding.
    prompt_tokens, new_tokens : int
        Tokens read, padding not counted, and tokens generated.
    finish_reason : {"stop", "length", "error"}
        An end-of-sequence token, a stop string or a stopping criterion; the limit; or a request that failed.
    error : str, optional
        Why it failed, in a sentence.
    sequence : int
        Which of `num_return_sequences` this is, from 0.
    """

    index: int
    prompt: Any
    text: str
    token_ids: list[int]
    prompt_tokens: int
    new_tokens: int
    finish_reason: FinishReason
    error: str | None = None
    sequence: int = 0


@dataclass(frozen=True)
class Request:
    """A prompt that can be generated from, and how far."""

    index: int
    prompt: Any
    token_ids: tuple[int, ...]
    max_new_tokens: int
    stop_strings: tuple[str, ...] = ()

    @property
    def cached_tokens(self) -> int:
        """What its row of a cache holds in the end: the last token is never fed to the model."""
        return len(self.token_ids) + self.max_new_tokens - 1

    def digest(self, settings: Mapping[str, Any]) -> str:
        """A hash of the prompt's ids, of this request's limits and of the settings that all requests share."""
        parts = [self.token_ids, self.max_new_tokens, self.stop_strings, settings]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class Limits:
    """What a model and its cache can take; `None` where nothing is known or set."""

    vocabulary: int | None
    positions: int | None
    cache_len: int | None

    def check(self, request: Request) -> None:
        """Raise a `ValueError` if the request goes beyond one of them."""
        if request.max_new_tokens < 1:
            raise ValueError(f"prompt: expected fewer tokens than max_length, got {len(request.token_ids)}")
        foreign = [token for token in request.token_ids if token < 0 or token >= (self.vocabulary or token + 1)]
        if foreign:
            raise ValueError(f"prompt: expected token ids from 0 to {(self.vocabulary or 0) - 1}, got {foreign[0]}")
        for limit, name in (
            (self.positions, "positions of the model (max_position_embeddings)"),
            (self.cache_len, "tokens of the cache (max_cache_len)"),
        ):
            if limit is not None and request.cached_tokens > limit:
                raise ValueError(
                    f"prompt: expected prompt and answer to fit into the {limit} {name}, got {len(request.token_ids)} "
                    f"tokens and max_new_tokens={request.max_new_tokens}"
                )


def prompts_of(prompts: Iterable[Any]) -> list[Any]:
    """The prompts as a list: of a list, a column of a data set, a generator.

    Raises
    ------
    TypeError
        If it is one prompt, or something that does not hold prompts.
    """
    if hasattr(prompts, "column_names"):
        raise TypeError(
            f"prompts: expected a column, such as dataset['text'], got a {type(prompts).__name__} with the columns "
            f"{prompts.column_names}"
        )
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts: expected a sequence of prompts, got {type(prompts).__name__}")
    # Tensors and arrays of ids, whether each by itself or all in one, become lists of ints.
    return [prompt.tolist() if hasattr(prompt, "tolist") else prompt for prompt in prompts]


def encode(tokenizer: Any, prompt: Any) -> tuple[int, ...]:
    """Token ids of a string (with the tokenizer's special tokens), of chat messages, or as they are given.

    Raises
    ------
    TypeError, ValueError
        If it is none of these, or empty.
    """
    ids: Sequence[int]
    if isinstance(prompt, str):
        ids = tokenizer(prompt, verbose=False)["input_ids"] if prompt else ()
    elif not isinstance(prompt, (list, tuple)):
        raise TypeError(
            f"prompt: expected a string, a list of chat messages or a list of token ids, got {type(prompt).__name__}"
        )
    elif prompt and all(isinstance(message, Mapping) for message in prompt):
        ids = _encode_chat(tokenizer, prompt)
    else:
        strange = next((item for item in prompt if isinstance(item, bool) or not isinstance(item, int)), None)
        if strange is not None:
            raise TypeError(f"prompt: expected a list of chat messages or of token ids, got one with {strange!r}")
        ids = prompt
    if len(ids) == 0:
        raise ValueError("prompt: expected at least one token, got an empty prompt")
    return tuple(ids)


def _encode_chat(tokenizer: Any, messages: Sequence[Any]) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("prompt: expected a string or token ids, as the tokenizer has no chat template, got messages")
    try:
        encoded = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
    except Exception as error:  # whatever a template raises is about these messages alone
        raise ValueError(f"prompt: expected messages that the chat template takes, which says: {error}") from error
    ids: list[int] = encoded["input_ids"]
    return ids


def limits_per_request(max_new_tokens: Any, count: int) -> list[int] | None:
    """`max_new_tokens` of each request, where one for all or one for each is given.

    Raises
    ------
    TypeError, ValueError
        If they are not ints of at least 1, or not as many as requests.
    """
    if max_new_tokens is None:
        return None
    each = _per_request("max_new_tokens", max_new_tokens, count, lambda value: isinstance(value, int))
    for limit in each:
        if isinstance(limit, bool) or not isinstance(limit, int):
            raise TypeError(f"max_new_tokens: expected an int or a sequence of them, got {limit!r}")
        if limit < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {limit}")
    return each


def stop_strings_per_request(stop_strings: Any, count: int) -> list[tuple[str, ...]]:
    """The stop strings of each request.

    Strings are for all requests, as in `generate`; a sequence of sequences (or `None`) has those of each.

    Raises
    ------
    TypeError, ValueError
        If they are not strings with at least one character, or sequences of them, as many as requests.
    """
    if stop_strings is None:
        return [()] * count
    each = _per_request("stop_strings", stop_strings, count, _is_strings)
    return [_strings(strings) for strings in each]


def _per_request(name: str, value: Any, count: int, is_one: Callable[[Any], bool]) -> list[Any]:
    if is_one(value):
        return [value] * count
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{name}: expected one value or a sequence of one for each prompt, got {value!r}")
    each = value.tolist() if hasattr(value, "tolist") else list(value)
    if len(each) != count:
        raise ValueError(f"{name}: expected one for each of the {count} prompts, got {len(each)}")
    return each


def _is_strings(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, (list, tuple)) and all(isinstance(string, str) for string in value)
    )


def _strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not _is_strings(value):
        raise TypeError(f"stop_strings: expected a string, a list of strings or None for each prompt, got {value!r}")
    strings = (value,) if isinstance(value, str) else tuple(value)
    if "" in strings:
        raise ValueError("stop_strings: expected strings of at least one character, got ''")
    return strings
