"""How a cache is handed to a model, which differs between versions of transformers."""

from __future__ import annotations

import transformers
from packaging.version import Version
from transformers import Cache


def cache_argument(cache: Cache) -> dict[str, Cache]:
    """`cache` as the keyword argument of `generate` and of a model call that does not warn.

    From transformers 5.24 on it is called `cache`; `past_key_values`, its name before, is still taken, with a warning.
    """
    renamed = Version(transformers.__version__) >= Version("5.24.0.dev0")
    return {"cache" if renamed else "past_key_values": cache}
