"""Quality measured against DynamicCache."""

import json
import subprocess
import sys

import pytest
import torch
from tiny import dynamic, llama, token_ids

from memos_hf import KVQuantizationConfig, MemOSCache
from memos_hf.evaluate import evaluate


def caches(model):
    two_bits = KVQuantizationConfig(2, 2, residual_tokens=8)
    return {
        "exact": lambda: MemOSCache(model.config),
        "two bits": lambda: MemOSCache(model.config, quantization=two_bits, block_size=8),
    }


def test_an_exact_cache_loses_nothing_and_two_bits_lose_something():
    model = llama()
    reference, exact, coarse = evaluate(model, token_ids(2, 120), caches(model), chunk=16, skip=32, progress=False)
    assert reference.tokens == exact.tokens == 2 * (119 - 32)
    assert reference.kl == 0
    assert exact.mean_kl < 1e-9
    assert exact.top1 == 1
    assert exact.perplexity == pytest.approx(reference.perplexity)
    assert coarse.mean_kl > 1e-4
    assert coarse.ratio < exact.ratio == 1


def test_perplexity_is_the_models_own():
    model = llama()
    ids = token_ids(1, 60)
    (reference,) = evaluate(model, ids, {}, chunk=7, skip=0, progress=False)
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert reference.perplexity == pytest.approx(float(loss.exp()), rel=1e-4)


def test_padding_is_not_counted_and_changes_nothing():
    model = llama()
    ids = token_ids(1, 80)
    mask = torch.ones(1, 100, dtype=torch.long)
    mask[:, :20] = 0
    padded = torch.cat([torch.zeros(1, 20, dtype=torch.long), ids], dim=1)
    (plain,) = evaluate(model, ids, {}, chunk=16, skip=10, progress=False)
    (left,) = evaluate(model, padded, {}, attention_mask=mask, chunk=16, skip=10, progress=False)
    assert left.tokens == plain.tokens
    assert left.perplexity == pytest.approx(plain.perplexity, rel=1e-4)


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="input_ids: expected rows of more than 257 tokens"):
        evaluate(llama(), token_ids(1, 100), {"D": lambda: dynamic(llama())})


@pytest.mark.slow
def test_the_command_line_prints_a_table_and_writes_json(tmp_path):
    pytest.importorskip("datasets")
    from smollm2 import find_smollm2

    text, report = tmp_path / "text.txt", tmp_path / "quality.json"
    text.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 40)
    command = [sys.executable, "-m", "memos_hf", "eval", "--model", find_smollm2(), "--text", str(text)]
    command += ["--tokens", "200", "--skip", "32", "--modes", "none", "int8", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "MemOSCache int8" in done.stdout
    names = [row["cache"] for row in json.loads(report.read_text())]
    assert names == ["DynamicCache", "MemOSCache none", "MemOSCache int8"]
