"""What a cache does to the quality of a model, measured against DynamicCache.

`evaluate` reads a text, `long_generation` writes one, `needle` looks for a fact in one; each takes any caches, made by
callables, on any causal model. `python -m memos_hf eval` is their command line.
"""

from .agreement import Agreement
from .caches import REFERENCE, CacheFactory
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
    "evaluate",
    "found_by_depth",
    "long_generation",
    "needle",
]
