"""SmolLM2-135M-Instruct: real weights, real text, token for token."""

import pydoc_data.topics

import pytest
import torch
from smollm2 import load_model
from tiny import dynamic, generate

from memos_hf import MemOSCache


@pytest.mark.slow
def test_two_hundred_tokens_from_a_thousand_are_the_same():
    model, tokenizer = load_model()
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = tokenizer(text[:8000], return_tensors="pt").input_ids[:, :1000]
    cache = MemOSCache.for_model(model)
    answers = [
        generate(model, ids, one, new_tokens=200, min_new_tokens=200, pad_token_id=2) for one in (cache, dynamic(model))
    ]
    assert torch.equal(*answers)
    assert answers[0].shape[1] == 1200
    token_bytes = 30 * 2 * 3 * 64 * 4  # layers, K and V, heads, head dim, float32
    assert cache.memory().used_bytes == cache.get_seq_length() * token_bytes
