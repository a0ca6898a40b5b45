"""One process reads a long text and saves its cache; another loads it and answers about the text at once.

The second process computes the question only. Its answer is compared with that of the first, whose cache was never
saved; loading with reading the text; the size of the file with the bytes that are valid:

    python examples/save_and_resume.py --tokens 6000 --quantization int8
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from cache_argument import cache_argument
from command_line import add_model_options, model_from, parser_for, verdict, write_json
from compare_dynamic_cache import example_text
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memos_hf import MemOSCache
from memos_hf.arguments import output_file, positive_int
from memos_hf.config import PRESETS
from memos_hf.store import load_input_ids

CHUNK = 512
FASTER_BAR = 20
SIZE_BAR = 1.02


def read_and_save(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """The first process: prefill, save, and answer too."""
    model, tokenizer = model_from(options)
    ids = example_text(tokenizer, options.tokens).to(model.device)
    cache = MemOSCache.for_model(model, quantization=options.quantization)
    start = time.perf_counter()
    with torch.inference_mode():
        for chunk in ids.split(CHUNK, dim=1):
            model(chunk, **cache_argument(cache), logits_to_keep=1)
    prefill_seconds = time.perf_counter() - start
    start = time.perf_counter()
    cache.save(path, input_ids=ids)
    return {
        "prefill_seconds": prefill_seconds,
        "save_seconds": time.perf_counter() - start,
        "valid_bytes": cache.memory().used_bytes,
        "answer": answer(model, tokenizer, cache, ids, options),
    }


def load_and_answer(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """The second process."""
    model, tokenizer = model_from(options)
    start = time.perf_counter()
    cache = MemOSCache.load(path, model)
    load_seconds = time.perf_counter() - start
    ids = load_input_ids(path)
    assert ids is not None
    return {"load_seconds": load_seconds, "answer": answer(model, tokenizer, cache, ids.to(model.device), options)}


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: MemOSCache,
    ids: Tensor,
    options: argparse.Namespace,
) -> str:
    """What the model says to the question after the cached `ids`, `[1, tokens]`."""
    question = f"\n\nQuestion: {options.question}\nAnswer:"
    new_ids = tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids.to(model.device)
    prompt = torch.cat([ids, new_ids], dim=1)
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        **cache_argument(cache),
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
    )
    return str(tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True))


def in_a_process(step: str, folder: Path) -> dict[str, Any]:
    """Run this file again for one step, with the same options; return what it found."""
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "--step", step, "--folder", str(folder)], check=True)
    found: dict[str, Any] = json.loads((folder / step).read_text())
    return found


def main() -> None:
    parser = parser_for(__doc__)
    add_model_options(parser)
    parser.add_argument("--tokens", type=positive_int, default=6000, help="of the text (%(default)s)")
    parser.add_argument("--quantization", choices=list(PRESETS), help="of the cache")
    parser.add_argument("--question", default="What is this text about?", help="(%(default)s)")
    parser.add_argument("--max-new-tokens", type=positive_int, default=32, help="length of the answer (%(default)s)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures")
    parser.add_argument("--step", choices=("save", "load"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step is not None:
        run = read_and_save if options.step == "save" else load_and_answer
        found = run(options, options.folder / "cache.safetensors")
        (options.folder / options.step).write_text(json.dumps(found))
        return

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saved, loaded = in_a_process("save", folder), in_a_process("load", folder)
        file_bytes = (folder / "cache.safetensors").stat().st_size
    print(f"{options.tokens:,} tokens read in {saved['prefill_seconds']:.1f} s, saved in {saved['save_seconds']:.2f} s")
    print(f"the answer of the process that loaded them: {loaded['answer'].strip()!r}")
    print(f"the same answer as without saving: {'yes' if loaded['answer'] == saved['answer'] else 'NO'}")
    faster = saved["prefill_seconds"] / loaded["load_seconds"]
    print(f"loaded in {loaded['load_seconds']:.3f} s, faster by {verdict(faster, FASTER_BAR, at_least=True)}")
    print(f"file, {file_bytes:,} bytes / valid bytes: {verdict(file_bytes / saved['valid_bytes'], SIZE_BAR)}")
    write_json(options.json, {**saved, **loaded, "same_answer": loaded["answer"] == saved["answer"]})


if __name__ == "__main__":
    main()
