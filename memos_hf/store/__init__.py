"""Caches in files: saved whole, checked before anything is built from them, loaded onto each layer's device.

A file is safetensors with a JSON document in its metadata. Nothing is pickled, and pickles are not read: to unpickle a
file is to run what its author put there.
"""

from .description import describe
from .file import load_input_ids
from .fingerprint import Fingerprint
from .tensors import CacheFileError

__all__ = ["CacheFileError", "Fingerprint", "describe", "load_input_ids"]
