"""A tokenizer for tiny models: a token for each printable character, and three special ones."""

from __future__ import annotations

import functools
import string

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>")
CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: "


@functools.cache
def character_tokenizer() -> PreTrainedTokenizerFast:
    """101 tokens: `SPECIAL`, then the printable characters but the last two."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *string.printable[:98]])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", chat_template=CHAT
    )
