"""The modes that are held against each other, and which of them to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..blocks.budget import memory_key
from ..blocks.staging import STAGED_SHARE
from ..config import OffloadConfig, Preset
from ..report import format_bytes
from .prediction import Prediction, predict
from .probe import Probe


@dataclass(frozen=True)
class Quality:
    """What a mode costs: SmolLM2-135M against DynamicCache, the README's table of reading 2,048 tokens.

    Attributes
    ----------
    kl : float
        KL divergence in nats a token.
    top1 : float
        How often the most likely token is the same.
    """

    kl: float
    top1: float


EXACT = Quality(0.0, 1.0)
QUALITY: dict[Preset, Quality] = {
    "int8": Quality(0.00003, 0.998),
    "fp8": Quality(0.0005, 0.990),
    "int4": Quality(0.0011, 0.981),
    "int2": Quality(0.024, 0.929),
}


@dataclass(frozen=True)
class Mode:
    """A way to keep a cache.

    Attributes
    ----------
    name : str
    quantization : str, optional
        The preset.
    static, offloaded : bool
        The options of that name.
    """

    name: str
    quantization: Preset | None = None
    static: bool = False
    offloaded: bool = False

    @property
    def quality(self) -> Quality:
        """What it costs."""
        return EXACT if self.quantization is None else QUALITY[self.quantization]

    def options(self, tokens: int, budget: dict[int | str, int]) -> dict[str, Any]:
        """Arguments of `MemOSCache` for so many tokens of each row; an offloaded one has `budget`."""
        if self.static:
            return {"static": True, "max_cache_len": tokens}
        options: dict[str, Any] = {"initial_capacity": tokens}
        if self.quantization is not None:
            options["quantization"] = self.quantization
        if self.offloaded:
            options["offload"] = OffloadConfig(budget)
        return options


MODES = (
    Mode("full"),
    Mode("static", static=True),
    Mode("int8", "int8"),
    Mode("fp8", "fp8"),
    Mode("int4", "int4"),
    Mode("int2", "int2"),
    Mode("full, offloaded", offloaded=True),
    Mode("int8, offloaded", "int8", offloaded=True),
    Mode("int4, offloaded", "int4", offloaded=True),
)
# The first that fits is the advice. Static is for compiled steps and is asked for, fp8 takes what int8 takes and costs
# more, and of int2 at 4,000 tokens of context a fact was found in 9 cases of 15.
PREFERRED = ("full", "int8", "int4", "int8, offloaded", "int4, offloaded")


@dataclass(frozen=True)
class Outlook:
    """A mode, and what it would take.

    Attributes
    ----------
    prediction : Prediction, optional
        `None` where the mode cannot be had for the model.
    fits : bool
        Whether the device has room for it, at the worst moment too.
    code : str
        The line that makes such a cache.
    refusal : str
        Why it cannot be had.
    """

    mode: Mode
    prediction: Prediction | None
    fits: bool
    code: str
    refusal: str = ""


@dataclass(frozen=True)
class Advice:
    """Which mode to take.

    Attributes
    ----------
    outlooks : tuple of Outlook
        Of all `MODES`.
    chosen : Outlook, optional
        `None` if nothing fits.
    reason : str
        Why.
    """

    outlooks: tuple[Outlook, ...]
    chosen: Outlook | None
    reason: str


def advise(found: Probe, *, memory: int, context: int, new_tokens: int = 1, batch_size: int = 1) -> Advice:
    """Predict every mode of `MODES` and choose one.

    Parameters
    ----------
    found : Probe
        Of the model.
    memory : int
        Bytes that the device has for the cache.
    context, new_tokens, batch_size : int
        As for :func:`predict`.
    """
    sizes: dict[str, Any] = {"context": context, "new_tokens": new_tokens, "batch_size": batch_size}
    budget = _budget(predict(found, **sizes), memory)
    outlooks = []
    for mode in MODES:
        options = mode.options(context + new_tokens, budget)
        if found.is_encoder_decoder:  # one cache has the prompt and one the answer
            if mode.static or mode.offloaded:
                continue
            del options["initial_capacity"]
        code = _code(options, budget, found.is_encoder_decoder)
        try:
            prediction = predict(found, **sizes, **options)
        except ValueError as error:
            outlooks.append(Outlook(mode, None, False, code, str(error)))
        else:
            outlooks.append(Outlook(mode, prediction, prediction.least_bytes <= memory, code))
    return _chosen(outlooks, memory)


def _budget(full: Prediction, memory: int) -> dict[int | str, int]:
    """What an offloaded cache may take beside two staging buffers and, of a prompt, a layer in full precision."""
    layer = full.peak_bytes - full.allocated_bytes
    return {memory_key(): max(memory - layer - int(2 * STAGED_SHARE * memory), 1)}


def _code(options: dict[str, Any], budget: dict[int | str, int], is_encoder_decoder: bool) -> str:
    """The line that makes a cache."""
    shown = {
        name: f"OffloadConfig({budget})" if isinstance(value, OffloadConfig) else repr(value)
        for name, value in options.items()
    }
    cache = f"MemOSCache({', '.join(['model.config', *(f'{name}={value}' for name, value in shown.items())])})"
    return f"cache = EncoderDecoderCache({cache}, {cache})" if is_encoder_decoder else f"cache = {cache}"


def _chosen(outlooks: Sequence[Outlook], memory: int) -> Advice:
    by_name = {outlook.mode.name: outlook for outlook in outlooks}
    too_much: list[str] = []
    for outlook in (by_name[name] for name in PREFERRED if name in by_name):
        if outlook.fits:
            return Advice(tuple(outlooks), outlook, _reason(outlook, too_much, by_name["int2"]))
        if outlook.prediction is not None:
            too_much.append(f"{outlook.mode.name} ({format_bytes(outlook.prediction.least_bytes)})")
    reason = f"Nothing fits into {format_bytes(memory)}: {', '.join(too_much)}. Take fewer rows or tokens."
    return Advice(tuple(outlooks), None, reason)


def _reason(outlook: Outlook, too_much: list[str], int2: Outlook) -> str:
    prediction, quality = outlook.prediction, outlook.mode.quality
    assert prediction is not None
    parts = [f"Too much at the worst moment: {', '.join(too_much)}."] if too_much else []
    if quality == EXACT:
        parts.append("It gives the tokens that DynamicCache gives.")
    else:
        parts.append(
            f"It takes {prediction.ratio:.2f} of full precision, at a KL divergence of {quality.kl:g} nats a token and "
            f"with the same most likely token in {quality.top1:.1%} of cases (SmolLM2-135M; `eval` measures yours)."
        )
    if outlook.mode.offloaded and prediction.below_bytes:
        parts.append(
            f"{format_bytes(prediction.below_bytes)} lie in host memory or on disk and are read at every step, so that "
            "steps take longer."
        )
        if int2.fits:
            parts.append("int2 fits and is faster, but finds 9 facts of 15 where DynamicCache finds all.")
    return " ".join(parts)
