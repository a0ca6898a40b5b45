"""memos_hf: a KV cache for HuggingFace Transformers."""

from .attention import interface
from .batches.requests import BatchOutput
from .batching import generate_batch
from .blocks.budget import MemoryBudget
from .cache import MemOSCache
from .config import CacheOptions, KVQuantizationConfig, OffloadConfig
from .report import CacheStats, DeviceMemory, MemoryReport
from .store import CacheFileError

interface.register()

__version__ = "0.1.0"

__all__ = [
    "BatchOutput",
    "CacheFileError",
    "CacheOptions",
    "CacheStats",
    "DeviceMemory",
    "KVQuantizationConfig",
    "MemOSCache",
    "MemoryBudget",
    "MemoryReport",
    "OffloadConfig",
    "generate_batch",
]
