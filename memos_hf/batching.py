"""`generate_batch`: many prompts through one model, in batches, what they have in common computed once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel

from .batches.output_file import OutputFile
from .batches.plan import Abilities, plan
from .batches.requests import (
    BatchOutput,
    Limits,
    Request,
    encode,
    limits_per_request,
    prompts_of,
    stop_strings_per_request,
)
from .batches.runner import Runner, vocabulary_of
from .batches.settings import Settings
from .cache import MemOSCache
from .store.prefix import PrefixStore


def generate_batch(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Iterable[Any],
    *,
    batch_size: int = 8,
    share_prefix: bool = True,
    progress: bool = True,
    cache_options: Mapping[str, Any] = {},
    max_new_tokens: int | Sequence[int] | None = None,
    stop_strings: str | Sequence[Any] | None = None,
    output_file: str | os.PathLike[str] | None = None,
    prefix_store: PrefixStore | None = None,
    **generate_kwargs: Any,
) -> list[BatchOutput]:
    """Generate from many prompts, in batches of about the same length; greedily, each row equals its run alone.

    Ids with which all prompts begin are computed once. Where every layer attends to all tokens, padding then stands
    behind them, in the middle of the rows; models with sliding windows share among rows of the same length, if that
    is less work, and recurrent ones do not share.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder; of a model that PEFT wraps, `get_base_model()`.
    tokenizer : PreTrainedTokenizerBase
        Or a processor that has one.
    prompts : iterable
        Strings, lists of chat messages (with a chat template) or lists of token ids, also mixed; a column of a
        data set.
    batch_size : int
        Rows in a batch, at most; each prompt has as many as it has beams or answers.
    share_prefix : bool
        Compute once what all prompts begin with, where the model allows it and it is less work.
    progress : bool
        Show a progress bar on a terminal or in a notebook.
    cache_options : mapping
        Of :class:`~memos_hf.MemOSCache`.
    max_new_tokens : int or sequence of int, optional
        One for all prompts or one for each; by default what `generate` would do.
    stop_strings : str, sequence of str or sequence of sequences, optional
        A string or strings for all prompts, or for each prompt a sequence of them (or `None`).
    output_file : path, optional
        Finished requests are appended to it, a JSON object a line. What is there already, from a run that was cut off,
        is not generated again if prompt, limits and generation options are the same; one file is for one model.
    prefix_store : PrefixStore, optional
        Of the same model. What all prompts begin with is looked up there, and kept there. Its `cache_options` count
        where `cache_options` say nothing else.
    **generate_kwargs
        Of `generate`: `do_sample`, `num_return_sequences`, `num_beams`, `generation_config` and so on.

    Returns
    -------
    list[BatchOutput]
        In the order of the prompts; with `num_return_sequences` so many for each. A request that is empty, of a wrong
        type or too long has `error` set, and the others are done.

    Raises
    ------
    TypeError, ValueError
        If an argument other than a single prompt is wrong, before anything is computed; what only `generate` checks,
        such as the names of its options, at the first batch.
    """
    prompts = prompts_of(prompts)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    _check(model, tokenizer, batch_size, share_prefix=share_prefix, progress=progress)
    if prefix_store is not None:
        cache_options = {**_checked_store(prefix_store, model), **cache_options}
    settings = Settings.of(model, generate_kwargs, stops=stop_strings is not None)
    cache = MemOSCache.for_model(model, **cache_options)
    limits = limits_per_request(max_new_tokens, len(prompts))
    stops = stop_strings_per_request(
        stop_strings if stop_strings is not None else settings.get("stop_strings"), len(prompts)
    )
    requests, done = _requests(model, tokenizer, prompts, settings, cache, limits, stops)

    with closing(OutputFile(output_file, settings.as_json())) as file:
        for outputs in done.values():
            file.append(outputs)
        for request in requests:
            if (finished := file.finished(request, settings.copies)) is not None:
                done[request.index] = finished
        planned = plan(
            [request for request in requests if request.index not in done],
            _abilities(model, cache, settings),
            batch_size=max(batch_size // max(settings.beams, settings.copies), 1),
            share_prefix=share_prefix,
            same_limit=settings.beams > 1,
            max_cache_len=cache.options.max_cache_len,
        )
        runner = Runner(model, tokenizer, settings, cache_options, planned.prefix, prefix_store)
        with tqdm(total=len(prompts), initial=len(done), unit="prompt", disable=not _shows(progress)) as bar:
            for batch in planned.batches:
                for request, outputs in zip(batch, runner.run(batch), strict=True):
                    done[request.index] = outputs
                    file.append(outputs, request)
                bar.update(len(batch))
    return [output for index in range(len(prompts)) for output in done[index]]


def _check(model: Any, tokenizer: Any, batch_size: Any, **switches: Any) -> None:
    """Raise for the first argument that is wrong."""
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        advice = "; get_base_model() gives it, with its adapters" if hasattr(model, "get_base_model") else ""
        raise TypeError(f"model: expected a transformers model that can generate, got {type(model).__name__}{advice}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"model: expected a decoder, got {type(model).__name__}, which has an encoder too")
    if not callable(tokenizer) or not hasattr(tokenizer, "decode"):
        raise TypeError(f"tokenizer: expected a tokenizer or a processor with one, got {type(tokenizer).__name__}")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int):
        raise TypeError(f"batch_size: expected an int, got {batch_size!r}")
    if batch_size < 1:
        raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected True or False, got {value!r}")


def _checked_store(store: Any, model: PreTrainedModel) -> Mapping[str, Any]:
    """The cache options of a store of prefixes, which is to be that of the model."""
    if not isinstance(store, PrefixStore):
        raise TypeError(f"prefix_store: expected a PrefixStore, got {type(store).__name__}")
    if store.model is not model:
        raise ValueError(
            f"prefix_store: expected a store of the model, got that of another {type(store.model).__name__}"
        )
    return store.cache_options or {}


def _requests(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[Any],
    settings: Settings,
    cache: MemOSCache,
    limits: Sequence[int] | None,
    stops: Sequence[tuple[str, ...]],
) -> tuple[list[Request], dict[int, list[BatchOutput]]]:
    """The prompts that can be generated from, and by their index what comes back for the others."""
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    allowed = Limits(vocabulary_of(model), positions, cache.options.max_cache_len)
    requests: list[Request] = []
    failed: dict[int, list[BatchOutput]] = {}
    for index, prompt in enumerate(prompts):
        ids: tuple[int, ...] = ()
        try:
            ids = encode(tokenizer, prompt)
            new_tokens = limits[index] if limits is not None else settings.new_tokens_after(len(ids))
            request = Request(index, prompt, ids, new_tokens, stops[index])
            allowed.check(request)
            requests.append(request)
        except (TypeError, ValueError) as error:
            failure = BatchOutput(index, prompt, "", [], len(ids), 0, "error", str(error))
            failed[index] = [replace(failure, sequence=sequence) for sequence in range(settings.copies)]
    return requests, failed


def _abilities(model: PreTrainedModel, cache: MemOSCache, settings: Settings) -> Abilities:
    """What model, cache and options allow together."""
    abilities = Abilities.of(model, cache)
    if settings.reads_prompt:
        abilities = replace(abilities, padding=False, padding_between=False)
    # Older versions of transformers read a prompt in chunks from its start, whatever the cache holds.
    return replace(abilities, sharing=False) if settings.get("prefill_chunk_size") is not None else abilities


def _shows(progress: bool) -> bool:
    """Whether there is somebody to look at a progress bar: on a terminal or in a notebook."""
    if not progress or sys.stderr.isatty():
        return progress
    from tqdm.notebook import tqdm_notebook  # imports IPython where it is installed

    return issubclass(tqdm, tqdm_notebook)
