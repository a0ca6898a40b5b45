"""What models call the cache that they are given."""

from __future__ import annotations

import inspect

from transformers import PreTrainedModel


def cache_argument(model: PreTrainedModel) -> str:
    """What `generate` and the model call their cache: renamed in transformers 5.24, where the old name warns."""
    if hasattr(model, "get_base_model"):  # of PEFT, whose `forward` names no arguments
        model = model.get_base_model()
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
