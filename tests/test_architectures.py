"""Every architecture that transformers generates with gives with MemOSCache what it gives with DynamicCache."""

from __future__ import annotations

import copy
from typing import Any

import families
import pytest
import torch
from architectures import CANNOT_RUN, CAUSAL, LISTED_VERSION, SEQUENCE_TO_SEQUENCE, Architecture
from families import Subject, Way
from tiny import VERSION
from transformers import PreTrainedModel

pytestmark = pytest.mark.slow

WAYS = (families.greedy, families.beams, families.left_padding, families.pieces)
ARCHITECTURES = list(dict.fromkeys((*CAUSAL, *SEQUENCE_TO_SEQUENCE)))


def built_and_run(architecture: Architecture) -> PreTrainedModel:
    """The model, after it has generated through a DynamicCache."""
    model = architecture.build()
    subject = Subject(copy.deepcopy(model))
    cache = subject.dynamic_cache()
    families.greedy(subject, cache)
    if not families.holds_anything(cache):
        raise TypeError(f"{architecture.name} does not write to the cache it is given")
    return model


def outcome(way: Way, model: PreTrainedModel, ours: bool) -> list[Any] | type[Exception]:
    """What a way gives, or the class of error it raises."""
    # A copy, as some models keep something of what they have seen.
    subject = Subject(copy.deepcopy(model))
    try:
        return way(subject, subject.memos_cache() if ours else subject.dynamic_cache())
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_gives_what_dynamic_cache_gives(architecture: Architecture) -> None:
    if architecture.name in CANNOT_RUN:
        pytest.skip(CANNOT_RUN[architecture.name])
    try:
        model = built_and_run(architecture)
    except Exception as error:
        if VERSION == LISTED_VERSION:
            raise
        pytest.skip(f"transformers {VERSION} cannot run it: {type(error).__name__}: {error}")
    for way in WAYS:
        ours, theirs = outcome(way, model, ours=True), outcome(way, model, ours=False)
        if isinstance(theirs, type):
            assert ours is theirs, f"{way.__name__}: DynamicCache raises {theirs}, MemOSCache gives {ours}"
        else:
            torch.testing.assert_close(ours, theirs, msg=lambda difference, way=way: f"{way.__name__}: {difference}")


@pytest.mark.skipif(VERSION != LISTED_VERSION, reason="the list of what cannot run is for another version")
@pytest.mark.parametrize(("entries", "least"), [(CAUSAL, 178), (SEQUENCE_TO_SEQUENCE, 37)], ids=["causal", "seq2seq"])
def test_nearly_all_architectures_are_compared(entries: list[Architecture], least: int) -> None:
    assert sum(entry.name not in CANNOT_RUN for entry in entries) >= least
