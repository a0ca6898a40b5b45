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
def test_the_snippets_run_one_after_the_other(monkeypatch, capsys, tmp_path):
    import transformers

    model, tokenizer = load_model()
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name: model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    monkeypatch.chdir(tmp_path)
    names = {}
    for snippet in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL):
        exec(snippet, names)
    printed = capsys.readouterr().out
    assert "allocated" in printed
    assert "of Asia are" in printed
