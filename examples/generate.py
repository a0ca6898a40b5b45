"""A chat answer from a small model whose keys and values are kept in a MemOSCache.

The answer is printed as it comes, then its speed, what the cache holds and what it did:

    python examples/generate.py --prompt "Why is the sky blue?"
"""

from __future__ import annotations

import time
from typing import Any

from cache_argument import cache_argument
from command_line import add_model_options, model_from, parser_for
from transformers import PreTrainedTokenizerBase, TextStreamer

from memos_hf import MemOSCache
from memos_hf.arguments import positive_int


class TimedStreamer(TextStreamer):
    """Prints tokens as they come and notes when they do: the prompt first, then one call a token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Take the prompt or the next token."""
        self.times.append(time.perf_counter())
        super().put(value)

    def speed(self) -> str:
        """The time to the first token, and tokens per second after it."""
        prompt, first, *later = self.times
        sentence = f"first token after {first - prompt:.2f} s"
        if later:
            sentence += f", then {len(later) / (later[-1] - first):.1f} tokens per second"
        return sentence


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> dict[str, Any]:
    """The prompt as a turn of a chat, or as it is if the model knows no chats."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def main() -> None:
    parser = parser_for(__doc__)
    add_model_options(parser)
    parser.add_argument(
        "--prompt", default="Why is the sky blue? Answer in three sentences.", help="what to ask (%(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=positive_int, default=200, help="length of the answer (%(default)s)")
    options = parser.parse_args()

    model, tokenizer = model_from(options)
    inputs = encode(tokenizer, options.prompt).to(model.device)
    cache = MemOSCache.for_model(model)
    streamer = TimedStreamer(tokenizer)
    model.generate(
        **inputs, **cache_argument(cache), max_new_tokens=options.max_new_tokens, do_sample=False, streamer=streamer
    )

    print(f"\n{streamer.speed()}\n")
    print(cache.memory())
    print(cache.stats)


if __name__ == "__main__":
    main()
