"""What the README says is what the package does."""

import re
from pathlib import Path

import pytest
from smollm2 import load_model

from memos_hf.config import REFUSED_COMBINATIONS

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_table_of_refused_combinations_is_the_one_in_the_code():
    for first, second, reason in REFUSED_COMBINATIONS:
        assert re.search(rf"\| `{first}` \| `?{second}`? \| {reason} \|", README), (first, second)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_the_snippets_run(monkeypatch, capsys):
    import transformers

    model, tokenizer = load_model()
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name: model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    first, batches = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(first, names)
    assert "allocated" in capsys.readouterr().out
    exec(batches, names)  # goes on with model and tokenizer
    assert len(capsys.readouterr().out.splitlines()) >= 3
