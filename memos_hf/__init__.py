"""memos_hf: a KV cache for HuggingFace Transformers."""

from .attention import interface
from .batches.requests import BatchOutput
from .batching import generate_batch
from .cache import MemOSCache
from .config import CacheOptions, KVQuantizationConfig
from .report import CacheStats, DeviceMemory, MemoryReport

interface.register()

__version__ = "0.1.0"

__all__ = [
    "BatchOutput",
    "CacheOptions",
    "CacheStats",
    "DeviceMemory",
    "KVQuantizationConfig",
    "MemOSCache",
    "MemoryReport",
    "generate_batch",
]
