"""How to generate: `generate`'s own options, sorted into those of the batch and those of each request."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

# `generate`'s own length where nobody says one.
DEFAULT_NEW_TOKENS = 20

# What cannot be handed to `generate` for every batch, and why.
REFUSED_ARGUMENTS = {
    **dict.fromkeys(("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids"), "prompts give it"),
    **dict.fromkeys(("cache", "past_key_values", "cache_implementation"), "cache_options say which cache is used"),
    "use_cache": "a cache is always used",
    "streamer": "rows of a batch come at the same time; set output_file to see what is done",
    "assistant_model": "it generates one row at a time",
    "prompt_lookup_num_tokens": "it generates one row at a time",
    "return_dict_in_generate": "outputs are BatchOutputs",
}
# Options under which a row depends on the ids of its prompt, and so on padding among them, and what switches each off.
READS_PROMPT: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "bad_words_ids": (None,),
    "sequence_bias": (None,),
    "watermarking_config": (None,),
    "guidance_scale": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
}
# What a model's own config may ask for, but not of a batch: `generate` would take it where nothing else is said.
REFUSED_DEFAULTS = {
    "prompt_lookup_num_tokens": REFUSED_ARGUMENTS["prompt_lookup_num_tokens"],
    "stop_strings": "requests have stop strings of their own; give them as an argument",
}
READS_PROMPT_ARGUMENTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")


@dataclass(frozen=True)
class Settings:
    """What all requests share.

    Attributes
    ----------
    config : GenerationConfig
        What was asked for; the rest is the model's own, as in `generate`.
    arguments : dict
        What goes to `generate` as it is.
    defaults : GenerationConfig
        The model's own.
    """

    config: GenerationConfig
    arguments: dict[str, Any]
    defaults: GenerationConfig

    @classmethod
    def of(cls, model: PreTrainedModel, arguments: Mapping[str, Any], stops: bool = False) -> Settings:
        """Those that keyword arguments of `generate` say, `generation_config` among them.

        Parameters
        ----------
        stops : bool
            Whether requests have stop strings.

        Raises
        ------
        TypeError, ValueError
            Naming an argument that makes no sense for every batch.
        """
        rest = dict(arguments)
        config = copy.deepcopy(rest.pop("generation_config", None))
        config = GenerationConfig() if config is None else config
        if not isinstance(config, GenerationConfig):
            raise TypeError(f"generation_config: expected a GenerationConfig, got {type(config).__name__}")
        for name, reason in REFUSED_ARGUMENTS.items():
            value = rest.get(name, getattr(config, name, None))
            if value is not None and value is not (name == "use_cache"):
                raise ValueError(f"{name}: not an argument of generate_batch, as {reason}, got {value!r}")
        for name, reason in REFUSED_DEFAULTS.items():
            if getattr(model.generation_config, name, None) is not None:
                raise ValueError(f"{name}: set in model.generation_config, but not for generate_batch, as {reason}")
        rest = config.update(**rest)
        settings = cls(config, rest, model.generation_config)
        if settings.beams > 1 and (stops or settings.get("stop_strings") or rest.get("stopping_criteria")):
            raise ValueError("num_beams: expected 1 with stop strings or stopping criteria, which end rows, not beams")
        return settings

    def get(self, name: str, default: Any = None) -> Any:
        """An option as `generate` would take it: what was asked for, else the model's own."""
        value = getattr(self.config, name, None)
        value = getattr(self.defaults, name, None) if value is None else value
        return default if value is None else value

    @property
    def beams(self) -> int:
        """Beams of each row."""
        return int(self.get("num_beams", 1))

    @property
    def copies(self) -> int:
        """Answers to each prompt."""
        return int(self.get("num_return_sequences", 1))

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a row."""
        ids = self.get("eos_token_id", ())
        return frozenset([ids] if isinstance(ids, int) else ids)

    @property
    def reads_prompt(self) -> bool:
        """Whether what a row generates depends on padding among the ids, which masks do not hide."""
        return any(self.get(name) not in off for name, off in READS_PROMPT.items()) or any(
            self.arguments.get(name) for name in READS_PROMPT_ARGUMENTS
        )

    def new_tokens_after(self, prompt_tokens: int) -> int:
        """How many tokens `generate` would add to a prompt if nothing else was asked for; may be less than 1."""
        if (new_tokens := self.get("max_new_tokens")) is not None:
            return int(new_tokens)
        if (length := self.get("max_length")) is not None:
            return int(length) - prompt_tokens
        return DEFAULT_NEW_TOKENS

    def for_batch(self, width: int, new_tokens: int, pad_token_id: int) -> GenerationConfig:
        """The config of one call of `generate` with rows of `width` ids."""
        config = copy.deepcopy(self.config)
        config.stop_strings = None
        config.max_length = config.max_new_tokens = None
        # The one of the two that the model's own config does not set: both together make `generate` warn.
        if self.defaults.max_new_tokens is None:
            config.max_length = width + new_tokens
        else:
            config.max_new_tokens = new_tokens
        config.pad_token_id = pad_token_id
        config.return_dict_in_generate = False
        config.use_cache = True  # some models' own config says otherwise
        return config

    def as_json(self) -> dict[str, Any]:
        """What was asked for, without what a version of transformers adds."""
        return {name: value for name, value in self.config.to_diff_dict().items() if name != "transformers_version"}
