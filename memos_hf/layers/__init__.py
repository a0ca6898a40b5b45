"""The kinds of layer a cache is made of."""

from .base import BufferedLayer
from .blocks import BlockLayer
from .contiguous import ContiguousLayer
from .offloaded import OffloadedLayer
from .sliding import SlidingLayer
from .sliding_blocks import SlidingBlockLayer

__all__ = ["BlockLayer", "BufferedLayer", "ContiguousLayer", "OffloadedLayer", "SlidingBlockLayer", "SlidingLayer"]
