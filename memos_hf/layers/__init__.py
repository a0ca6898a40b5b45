"""The kinds of layer a cache is made of."""

from .base import BufferedLayer
from .contiguous import ContiguousLayer
from .sliding import SlidingLayer

__all__ = ["BufferedLayer", "ContiguousLayer", "SlidingLayer"]
