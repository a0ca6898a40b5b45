"""What a cache does to the quality of a model, measured against DynamicCache.

`evaluate` reads a text, `long_generation` writes one, `needle` looks for a fact in one; each takes any caches, made by
callables, on any causal model. `python -m memos_hf eval` is their command line.
"""

from .agreement import Agreement
from .contenders import REFERENCE, CacheFactory, caches_for
from .generation import LongGeneration, Window, long_generation
from .haystack import MAGIC_NUMBER, Fact, Needle, found_by_depth, needle
from .teacher_forcing import Quality, evaluate

__all__ = [
    "MAGIC_NUMBER",
    "REFERENCE",
    "Agreement",
    "CacheFactory",
    "Fact",
    "LongGeneration",
    "Needle",
    "Quality",
    "Window",
    "caches_for",
    "evaluate",
    "found_by_depth",
    "long_generation",
    "needle",
]
