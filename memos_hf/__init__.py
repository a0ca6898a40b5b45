"""memos_hf: a KV cache for HuggingFace Transformers."""

from .attention import interface
from .batches.requests import BatchOutput
from .batching import generate_batch
from .blocks.budget import MemoryBudget
from .cache import MemOSCache
from .config import CacheOptions, KVQuantizationConfig, OffloadConfig
from .report import CacheStats, DeviceMemory, LayerMemory, MemoryReport
from .store import CacheFileError
from .store.prefix import PrefixStore, PrefixStoreStats

interface.register()

__version__ = "0.1.0"

__all__ = [
    "BatchOutput",
    "CacheFileError",
    "CacheOptions",
    "CacheStats",
    "DeviceMemory",
    "KVQuantizationConfig",
    "LayerMemory",
    "MemOSCache",
    "MemoryBudget",
    "MemoryReport",
    "OffloadConfig",
    "PrefixStore",
    "PrefixStoreStats",
    "generate_batch",
]
