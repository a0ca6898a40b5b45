"""A conversation whose cache is kept over its turns, so that each computes its new tokens alone."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList, TextStreamer

from ..cache import MemOSCache
from ..cache_argument import cache_argument
from ..store import load_input_ids
from ..store.file import FIXED_OPTIONS

Message = dict[str, str]
# Beside the file of a saved cache, the messages that its tokens are.
MESSAGES_SUFFIX = ".messages.json"


@dataclass(frozen=True)
class Answer:
    """What one turn gave.

    Attributes
    ----------
    text : str
    prompt_tokens : int
        Tokens of the whole conversation before the answer.
    computed_tokens : int
        Those of them that were not in the cache.
    new_tokens : int
        Tokens of the answer.
    finish_reason : {"stop", "length", "interrupted"}
        The model ended it, the limit did, or :meth:`Conversation.stop`.
    first_token_seconds, tokens_per_second : float
        Until the first token, and after it; 0 where there is no second one.
    """

    text: str
    prompt_tokens: int
    computed_tokens: int
    new_tokens: int
    finish_reason: Literal["stop", "length", "interrupted"]
    first_token_seconds: float
    tokens_per_second: float


class Conversation:
    """Turns of a user and a model.

    With a chat template, each turn is the whole conversation as the template has it, and what of it begins as the cache
    does is not computed again. Templates may render earlier answers anew (without what the model thought, say); the
    cache is then cropped to what is still the same, or, where its layers cannot, emptied. Without a template, each turn
    goes on with the text so far.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder.
    tokenizer : PreTrainedTokenizerBase
    cache_options : dict
        Arguments of `MemOSCache`.
    max_new_tokens : int
        Tokens of an answer at most.
    temperature : float, optional
        0: the most likely token. `None`: as the model's generation config says.
    system : str, optional
        The system message.

    Raises
    ------
    TypeError, ValueError
        As by `MemOSCache`; if `system` is given and there is no chat template.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache_options: dict[str, Any],
        *,
        max_new_tokens: int,
        temperature: float | None = None,
        system: str | None = None,
    ) -> None:
        if system is not None and not tokenizer.chat_template:
            raise ValueError("system: expected None, as the tokenizer has no chat template")
        self.model, self.tokenizer, self.max_new_tokens = model, tokenizer, max_new_tokens
        self.cache = MemOSCache.for_model(model, **cache_options)
        # What holds for a cache that is loaded too, whatever its file says.
        self._beside_the_file = {name: it for name, it in cache_options.items() if name not in FIXED_OPTIONS}
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._generation = _generation_config(model, tokenizer, temperature)
        self._stopped = threading.Event()
        self._forget()

    def _forget(self) -> None:
        self.messages: list[Message] = list(self._system)
        self._said: Tensor | None = None  # ids of everything, `[1, tokens]`, the last of which may not be cached
        self._cached = 0  # how many of them are

    @property
    def room(self) -> int | None:
        """Tokens that a conversation may have: the model's positions or the ceiling of the cache; `None`: any."""
        config = self.model.config.get_text_config(decoder=True)
        limits = getattr(config, "max_position_embeddings", None), self.cache.options.max_cache_len
        return min((limit for limit in limits if limit is not None), default=None)

    def stop(self) -> None:
        """End the answer that is being given with its next token. For signal handlers and other threads."""
        self._stopped.set()

    def reset(self) -> None:
        """Forget all turns; the memory of the cache is kept."""
        self.cache.reset()
        self._forget()

    def answer(self, prompt: str, show: Callable[[str], None]) -> Answer:
        """Take a turn.

        Should it fail, or be interrupted in the midst of a step, the cache is emptied, and the next turn computes the
        conversation anew.

        Parameters
        ----------
        prompt : str
        show : callable
            Is given the text of the answer, piece by piece.

        Raises
        ------
        ValueError
            If there is no room for the prompt and an answer; nothing has changed then.
        """
        ids = self._ids_with(prompt)
        limit = self.max_new_tokens if self.room is None else min(self.max_new_tokens, self.room - ids.shape[1])
        if limit < 1:
            raise ValueError(
                f"prompt: expected a conversation of less than {self.room} tokens, which is what model and cache take, "
                f"got {ids.shape[1]}"
            )
        self._stopped.clear()
        computed = ids.shape[1] - self._keep_common(ids)
        streamer = _Streamer(self.tokenizer, show)
        try:
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=self._limited_to(limit),
                stopping_criteria=StoppingCriteriaList([self._is_stopped]),
                streamer=streamer,
                **{cache_argument(self.model): self.cache},
            )
        except BaseException:
            self.cache.reset()  # a step that was cut off may have left its tokens in some layers only
            self._cached = 0
            raise
        return self._took_turn(prompt, ids, output, computed, streamer)

    def _limited_to(self, new_tokens: int) -> GenerationConfig:
        config = copy.copy(self._generation)
        config.max_new_tokens = new_tokens
        return config

    def _is_stopped(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self._stopped.is_set(), device=input_ids.device)

    def _took_turn(self, prompt: str, ids: Tensor, output: Tensor, computed: int, streamer: _Streamer) -> Answer:
        self._said, self._cached = output, self.cache.get_seq_length()
        new = output[0, ids.shape[1] :]
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        self.messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
        ended = int(new[-1]) in _as_list(self._generation.eos_token_id)
        finish: Literal["stop", "length", "interrupted"] = (
            "stop" if ended else "interrupted" if self._stopped.is_set() else "length"
        )
        return Answer(text, ids.shape[1], computed, len(new), finish, *streamer.speed())

    def _ids_with(self, prompt: str) -> Tensor:
        """Ids of the conversation and one more prompt, `[1, tokens]`."""
        if self.tokenizer.chat_template:
            messages = [*self.messages, {"role": "user", "content": prompt}]
            ids: Tensor = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
        else:
            ids = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=self._said is None)["input_ids"]
        ids = ids.to(self.model.device)
        if not self.tokenizer.chat_template and self._said is not None:
            ids = torch.cat([self._said, ids], dim=1)
        if ids.shape[1] == 0:
            raise ValueError("prompt: expected some text, got none")
        return ids

    def _keep_common(self, ids: Tensor) -> int:
        """Crop the cache to what `ids` begins with, less one token at least; returns how many tokens that leaves."""
        if self._said is None or self._cached == 0:
            return 0
        most = min(self._cached, ids.shape[1] - 1)
        same = (self._said[0, :most] == ids[0, :most]).long().cumprod(dim=0)
        common = int(same.sum())
        if common < self._cached:
            try:
                self.cache.crop(common - self._cached)
            except RuntimeError:  # a window that is full, a recurrent state
                self.cache.reset()
                common = 0
        self._cached = common
        return common

    def save(self, path: Path) -> None:
        """Save the cache at `path`, and the messages beside it. Raises as :meth:`MemOSCache.save` does."""
        if self._said is None:
            raise ValueError("save: expected a conversation, nothing has been said yet")
        self.cache.save(path, input_ids=self._said, model=self.model)
        messages = path.with_name(path.name + MESSAGES_SUFFIX)
        messages.write_text(json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def load(self, path: Path) -> None:
        """Go on with a saved conversation. Raises as :meth:`MemOSCache.load` does; nothing has changed then."""
        cache = MemOSCache.load(path, self.model, **self._beside_the_file)
        ids = load_input_ids(path)
        if ids is None:
            raise ValueError(f"load: expected a saved conversation, got a cache without token ids, {path}")
        messages = json.loads(path.with_name(path.name + MESSAGES_SUFFIX).read_text(encoding="utf-8"))
        self.cache, self.messages = cache, messages
        self._said, self._cached = ids.to(self.model.device), cache.get_seq_length()


class _Streamer(TextStreamer):  # type: ignore[misc]
    """Hands on text as it comes, and notes when."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._show = show
        self._times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Take the prompt, then one token at a time."""
        self._times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Take text that no later token will change."""
        self._show(text)

    def speed(self) -> tuple[float, float]:
        """Seconds from the prompt to the first token, and tokens a second after it."""
        prompt, first, last = self._times[0], self._times[1], self._times[-1]
        return first - prompt, (len(self._times) - 2) / (last - first) if last > first else 0.0


def _generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, temperature: float | None
) -> GenerationConfig:
    """The model's own, without what would only be warned of."""
    config = copy.deepcopy(model.generation_config)
    config.max_length = None
    if temperature is not None:
        config.do_sample = temperature > 0
        config.temperature = temperature if temperature > 0 else None
    if not config.do_sample:
        config.temperature = config.top_p = config.top_k = None
    if config.eos_token_id is None:
        config.eos_token_id = tokenizer.eos_token_id
    if config.pad_token_id is None:
        config.pad_token_id = next(iter(_as_list(config.eos_token_id)), None)
    return config


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else ids if isinstance(ids, list) else [ids]
