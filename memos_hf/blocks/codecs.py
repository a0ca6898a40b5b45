"""Codecs: how a sealed block of K or V is stored, encoded once and decoded without its neighbours.

A codec turns `[n, heads, block, head_dim]` into a few tensors whose first dimension is `n`, so that each can lie in an
arena of slots. Codes are laid out for the kernels that read them in place::

    full    codes  [heads, block, head_dim]      in the dtype of the model
    keys    codes  [heads, head_dim, block]      the loop over tokens is the contiguous one
    values  codes  [heads, block, head_dim]

Below 8 bits, several codes share a byte along the last dimension, in stretches: the byte at `j` of `w` holds the codes
of positions `j`, `j + w`, …, so that unpacking a run of bytes gives runs of neighbours.

What is not here, because it cost more than it gave in measurements on SmolLM2: channel means that are subtracted from
keys (at 4 bits a KL divergence of 0.0013 instead of 0.0011, at 2 bits 0.031 instead of 0.024), for which zero points
stand in, and code books for a normal distribution (Lloyd-Max; 0.0020 and 0.050 at best).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, cast, get_args

import torch
from torch import Tensor

Kind = Literal["full", "int8", "int4", "int2", "fp8"]
Axis = Literal["token", "channel", "tensor"]
Role = Literal["key", "value"]

BITS: dict[str, int] = {"int8": 8, "fp8": 8, "int4": 4, "int2": 2}

# Finite values beyond this are stored as this. It leaves room for a rotation, which can gather a row's whole norm in
# one channel, in the range of float16 scales.
LARGEST_VALUE = 16384.0
FLOAT16_MAX = 65504.0
FP8_MAX = 448.0
# Largest magnitude under `axis="tensor"`: the fixed scale is this over the largest code, 0.1 at 8 bits.
TENSOR_RANGE = 12.7

# Zero points are stored in 8 bits as multiples of so many steps: the fewer levels, the more a shifted grid costs.
ZERO_UNITS = {"int4": 1.0, "int2": 0.25}

# Float32 temporaries of one encoding pass stay below about ten times this many elements.
ELEMENTS_PER_PASS = 1 << 22


@dataclass(frozen=True)
class CodecSpec:
    """How keys or values are encoded; what a codec needs beside the geometry of a layer.

    Parameters
    ----------
    kind : {"full", "int8", "int4", "int2", "fp8"}
        Storage of one element. "full" keeps the dtype that came. int8 and fp8 (e4m3) are symmetric about 0; int4 and
        int2 keep a zero point for each group beside its scale, unless `symmetric`.
    axis : {"token", "channel", "tensor"}
        What shares a scale: channels of one token, tokens of one channel (as in KIVI, arXiv:2402.02750), or
        everything, by a fixed scale that covers ±12.7 and clips beyond.
    group_size : int, optional
        Elements that share a scale. `None`: all channels of a token, or all tokens of a block.
    rotation : {"hadamard"}, optional
        Multiply each token's channels by an orthonormal Hadamard matrix first, which spreads outliers over channels
        (as in QuaRot, arXiv:2404.00456). Attention rotates the query, and rotates its output back, once.
    symmetric : bool
        Of int4 and int2: levels symmetric about 0 (±½, ±1½, … steps) and no zero points, which suits what has been
        rotated.

    Raises
    ------
    ValueError
        Naming the field, what was expected and what came.
    """

    kind: Kind = "full"
    axis: Axis = "token"
    group_size: int | None = None
    rotation: Literal["hadamard"] | None = None
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind: expected one of {get_args(Kind)}, got {self.kind!r}")
        if self.axis not in get_args(Axis):
            raise ValueError(f"axis: expected one of {get_args(Axis)}, got {self.axis!r}")
        if self.rotation not in (None, "hadamard"):
            raise ValueError(f"rotation: expected 'hadamard' or None, got {self.rotation!r}")
        size = self.group_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"group_size: expected an int of at least 1 or None, got {size!r}")
        if self.kind == "full" and (self.axis, size, self.rotation) != ("token", None, None):
            raise ValueError(f"kind 'full': expected no axis, group_size or rotation, got {self}")
        if self.symmetric and self.kind not in ("int4", "int2"):
            raise ValueError(f"symmetric: expected False for kind {self.kind!r}, which has one form only, got True")
        if self.axis == "tensor" and self.group_size is not None:
            raise ValueError(f"axis 'tensor': expected group_size None, got {self.group_size}")

    def __str__(self) -> str:
        """One line that :meth:`parse` reads, such as `"int4 channel 64 hadamard"`."""
        if self.kind == "full":
            return "full"
        words: list[str] = [self.kind, self.axis]
        words += [str(self.group_size)] if self.group_size is not None else []
        words += ["hadamard"] if self.rotation else []
        words += ["symmetric"] if self.symmetric else []
        return " ".join(words)

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> CodecSpec:
        """The spec that `str` wrote."""
        kind, *words = text.split()
        options: dict[str, object] = {}
        for word in words:
            if word in get_args(Axis):
                options["axis"] = word
            elif word.isdecimal():
                options["group_size"] = int(word)
            elif word == "hadamard":
                options["rotation"] = word
            elif word == "symmetric":
                options[word] = True
            else:
                raise ValueError(f"codec: expected words of a CodecSpec, got {word!r} in {text!r}")
        return CodecSpec(cast(Kind, kind), **options)  # type: ignore[arg-type]

    def fitted_to(self, head_dim: int, block_size: int) -> CodecSpec:
        """The nearest spec that a head dim and a block size allow: smaller groups, no rotation nor what needs it."""
        spec = self
        if spec.axis == "channel" and spec.group_size is not None:
            spec = replace(spec, group_size=min(spec.group_size, block_size))
        if spec.rotation and not is_power_of_two(head_dim):
            spec = replace(spec, rotation=None, symmetric=False)
        if spec.axis == "token" and spec.group_size is not None and head_dim % spec.group_size:
            shared = math.gcd(spec.group_size, head_dim)
            spec = replace(spec, group_size=shared if shared >= 8 else None)
        return spec


class BlockCodec:
    """Encodes and decodes blocks of K or V of one layer.

    Parameters
    ----------
    spec : CodecSpec
    role : {"key", "value"}
        Chooses the layout of the codes.
    head_dim : int
        Of the K or V to encode. Any; below 8 bits, values are padded inside to whole bytes.
    block_size : int
        Tokens in a block, a power of two of at least 8.
    dtype : torch.dtype
        Floating dtype of what is encoded, and of what `decode` gives.

    Raises
    ------
    TypeError, ValueError
        If the group size does not divide what is grouped, a rotation meets a head dim that is no power of two, values
        were to be grouped along tokens, or the dtype is not floating.
    """

    def __init__(self, spec: CodecSpec, role: Role, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
        self.spec, self.role = spec, role
        self.head_dim, self.block_size, self.dtype = head_dim, block_size, dtype
        self._layouts: dict[int, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
        self._check()
        packed = self._per_byte if role == "value" else 1
        self.channels = -(-head_dim // packed) * packed  # stored channels, padding included
        grouped = {"token": (self.channels, 1), "channel": (1, block_size), "tensor": (self.channels, block_size)}
        self.group_channels, self.group_tokens = grouped[spec.axis]
        if spec.group_size is not None:
            if spec.axis == "token":
                self.group_channels = spec.group_size
            else:
                self.group_tokens = spec.group_size

    def _check(self) -> None:
        spec = self.spec
        if not self.dtype.is_floating_point:
            raise TypeError(f"dtype: expected a floating dtype to quantize, got {self.dtype}")
        if self.block_size < 8 or not is_power_of_two(self.block_size):
            raise ValueError(f"block_size: expected a power of two of at least 8, got {self.block_size}")
        if spec.rotation and not is_power_of_two(self.head_dim):
            raise ValueError(f"rotation: expected a head dim that is a power of two, got {self.head_dim}")
        if self.role == "value" and spec.axis == "channel":
            raise ValueError("axis: expected 'token' or 'tensor' for values, got 'channel'")
        if spec.group_size is not None:
            what, whole = "head dim", self.head_dim
            if spec.axis == "channel":
                what, whole = "block size", self.block_size
            elif self.role == "value" and whole % self._per_byte:
                what, whole = f"head dim that is a multiple of {self._per_byte}", 0
            if whole == 0 or whole % spec.group_size:
                raise ValueError(
                    f"group_size: expected a divisor of the {what}, got {spec.group_size} for head dim "
                    f"{self.head_dim} and block size {self.block_size}"
                )

    @cached_property
    def _per_byte(self) -> int:
        return 8 // BITS.get(self.spec.kind, 8)

    @cached_property
    def has_zero_points(self) -> bool:
        """Whether a group keeps a zero point beside its scale."""
        return self.spec.kind in ("int4", "int2") and not self.spec.symmetric

    @cached_property
    def zero_unit(self) -> float:
        """What a stored zero point of 1 stands for, in steps."""
        return ZERO_UNITS.get(self.spec.kind, 1.0)

    @cached_property
    def lowest(self) -> float:
        """What a code of 0 stands for, in steps, where there is no zero point."""
        return -self._top / 2 if self.spec.kind in ("int4", "int2") else 0.0

    @cached_property
    def scale_unit(self) -> float:
        """What a stored scale of 1 stands for: a power of two that centres the scales on the range of float16."""
        if self.spec.kind == "full":
            return 1.0
        largest = LARGEST_VALUE * self._growth
        step = 2 * largest / self._top if self.spec.kind in ("int4", "int2") else largest / self._top
        return 2.0 ** -math.floor(math.log2(FLOAT16_MAX / step))

    @cached_property
    def _growth(self) -> float:
        """By how much a rotation can enlarge the largest magnitude."""
        return math.sqrt(self.head_dim) if self.spec.rotation else 1.0

    @cached_property
    def _top(self) -> float:
        """The largest code."""
        return {"int8": 127.0, "fp8": FP8_MAX, "int4": 15.0, "int2": 3.0}[self.spec.kind]

    def layout(self, heads: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape of one block and dtype of each tensor it is stored in, in the order in which operators take them."""
        if heads not in self._layouts:
            self._layouts[heads] = self._layout(heads)
        return self._layouts[heads]

    def _layout(self, heads: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        if self.spec.kind == "full":
            return {"codes": ((heads, self.block_size, self.head_dim), self.dtype)}
        code_dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(self.spec.kind, torch.uint8)
        groups = self.channels // self.group_channels, self.block_size // self.group_tokens
        codes = self._ordered(self.channels, self.block_size)
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "codes": ((heads, codes[0], codes[1] // self._per_byte), code_dtype),
            "scales": ((heads, *self._ordered(*groups)), torch.float16),
        }
        if self.has_zero_points:
            tensors["zeros"] = (tensors["scales"][0], torch.int8)
        return tensors

    def bytes_per_block(self, heads: int) -> int:
        """Bytes of one encoded block of `heads` heads."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.layout(heads).values())

    def encode(self, states: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Encode blocks.

        Parameters
        ----------
        states : Tensor
            `[n, heads, block_size, head_dim]`. A NaN or infinity is stored as 0 (as it is, by kind "full"), so that
            no other token suffers; finite values are clipped at ±16384.

        Returns
        -------
        encoded : dict[str, Tensor]
            As :meth:`layout` says, with `n` in front.
        damaged : Tensor
            int64 scalar on the device of `states`: tokens of a block with a NaN or infinity in any head.
        """
        expected = self.block_size, self.head_dim
        if states.ndim != 4 or tuple(states.shape[2:]) != expected:
            raise ValueError(f"states: expected [n, heads, {expected[0]}, {expected[1]}], got {tuple(states.shape)}")
        if states.is_meta:  # there is nothing to encode: caches are filled so to count their bytes
            layout = self.layout(states.shape[1]).items()
            encoded = {name: states.new_empty((len(states), *shape), dtype=dtype) for name, (shape, dtype) in layout}
            return encoded, states.new_zeros((), dtype=torch.int64)
        damaged = (~states.isfinite()).any(dim=3).any(dim=1).sum()
        if self.spec.kind == "full":
            return {"codes": states.to(self.dtype)}, damaged
        per_pass = max(1, ELEMENTS_PER_PASS // max(1, states[:1].numel()))
        with torch.autocast(states.device.type, enabled=False):
            parts = [self._encode_pass(part) for part in torch.split(states, per_pass)]
            return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, damaged

    def decode(self, encoded: dict[str, Tensor]) -> Tensor:
        """Decode blocks to `[n, heads, block_size, head_dim]` in the codec's dtype."""
        if self.spec.kind == "full":
            return encoded["codes"]
        with torch.autocast(encoded["codes"].device.type, enabled=False):
            return self._decode(encoded)

    def _decode(self, encoded: dict[str, Tensor]) -> Tensor:
        states = self.decode_rotated(encoded)
        if self.spec.rotation:
            states = states @ hadamard(self.head_dim, states.device)
        return states.to(self.dtype)

    def decode_rotated(self, encoded: dict[str, Tensor]) -> Tensor:
        """Decode blocks to float32 `[n, heads, block_size, head_dim]`, leaving a rotation in place."""
        codes = encoded["codes"]
        if self.spec.kind == "full":
            return codes.float()
        scales = encoded["scales"].float()
        numbers = _unpack(codes, self._per_byte) if self._per_byte > 1 else codes.float()
        if self.has_zero_points:
            grouped = self._grouped(numbers) + self._spread(encoded["zeros"].float() * self.zero_unit)
        else:
            grouped = self._grouped(numbers) + self.lowest
        states = grouped * self._spread(scales * self.scale_unit)
        states = self._token_major(states.reshape(numbers.shape))
        return states[..., : self.head_dim]

    def _encode_pass(self, states: Tensor) -> dict[str, Tensor]:
        states = torch.nan_to_num(states.float(), nan=0.0, posinf=0.0, neginf=0.0)
        states = states.clamp_(-LARGEST_VALUE, LARGEST_VALUE)
        if self.spec.rotation:
            states = states @ hadamard(self.head_dim, states.device)
        encoded: dict[str, Tensor] = {}
        if self.channels > self.head_dim:
            # Repeating a channel leaves the range of its group as it is, which zeros would not.
            last = states[..., -1:].expand(*states.shape[:-1], self.channels - self.head_dim)
            states = torch.cat([states, last], dim=-1)
        ordered = states.transpose(2, 3) if self.role == "key" else states
        grouped = self._grouped(ordered)
        codes, scales, zeros = self._quantize(grouped)
        codes = codes.reshape(ordered.shape)
        codes_dtype = self.layout(1)["codes"][1]
        encoded["codes"] = _pack(codes, self._per_byte) if self._per_byte > 1 else codes.to(codes_dtype)
        encoded["scales"] = self._gathered(scales)
        if zeros is not None:
            encoded["zeros"] = self._gathered(zeros).to(torch.int8)
        return {name: encoded[name].contiguous() for name in self.layout(1)}

    def _quantize(self, grouped: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes as floats, stored scales and zero points, of elements grouped in dimensions 3 and 5."""
        if self.spec.kind in ("int4", "int2"):
            return self._quantize_few_bits(grouped)
        scales = self._stored_scale(self._largest(grouped) / self._top)
        codes = (grouped * self._inverse(scales)).clamp_(-self._top, self._top)
        return codes if self.spec.kind == "fp8" else codes.round_(), scales, None

    def _quantize_few_bits(self, grouped: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """A grid over each group's range, fitted once to the codes it gives.

        More rounds, or a grid that clips, would lessen the mean error; attention is the worse for it, since the
        largest keys decide where it looks.
        """
        low, high = grouped.amin(dim=(3, 5), keepdim=True), grouped.amax(dim=(3, 5), keepdim=True)
        if not self.has_zero_points or self.spec.axis == "tensor":
            high = self._largest(grouped)
            low = -high
        middle, steps = (low + high) / 2, (high - low) / self._top
        codes, scales, points = self._on_grid(grouped, middle, steps)
        if self.spec.axis != "tensor":
            codes, scales, points = self._on_grid(grouped, *self._fit(grouped, codes, steps))
        return codes, scales, points

    def _on_grid(self, grouped: Tensor, middle: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes, scales and zero points for grids with these middles and steps, as nearly as they can be stored."""
        if not self.has_zero_points:
            scales = self._stored_scale(steps)
            codes = grouped * self._inverse(scales) - self.lowest
            return codes.round_().clamp_(0, self._top), scales, None
        # A zero point that would not fit in 8 bits is brought nearer by a coarser step.
        steps = torch.maximum(steps, middle.abs() / (127 * self.zero_unit - self._top / 2))
        scales = self._stored_scale(steps)
        inverse = self._inverse(scales)
        points = ((middle * inverse - self._top / 2) / self.zero_unit).round_().clamp_(-128, 127)
        codes = grouped * inverse - points * self.zero_unit
        return codes.round_().clamp_(0, self._top), scales, points

    def _fit(self, grouped: Tensor, codes: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Middle and step of the grid that fits given codes best; a group whose codes are all alike keeps its step."""
        codes = codes - self._top / 2
        mean_code, mean = codes.new_zeros(()), codes.new_zeros(())
        if self.has_zero_points:
            mean_code, mean = codes.mean(dim=(3, 5), keepdim=True), grouped.mean(dim=(3, 5), keepdim=True)
        centered = codes - mean_code
        variance = centered.square().sum(dim=(3, 5), keepdim=True)
        fitted = (centered * (grouped - mean)).sum(dim=(3, 5), keepdim=True) / variance
        steps = torch.where((variance > 0) & (fitted > 0), fitted, steps)
        return mean - steps * mean_code, steps

    def _largest(self, grouped: Tensor) -> Tensor:
        if self.spec.axis == "tensor":
            return torch.full_like(grouped[:, :, :1, :1, :1, :1], TENSOR_RANGE)
        return grouped.abs().amax(dim=(3, 5), keepdim=True)

    def _stored_scale(self, scale: Tensor) -> Tensor:
        """Float16 for a scale; one that is too small becomes the smallest there is rather than zero."""
        stored = (scale / self.scale_unit).clamp(max=FLOAT16_MAX)
        return torch.where(scale > 0, stored.clamp(min=2.0**-24), stored).half()

    def _inverse(self, stored: Tensor) -> Tensor:
        scale = stored.float() * self.scale_unit
        return torch.where(scale > 0, 1 / scale, 0)

    def _ordered(self, channels: int, tokens: int) -> tuple[int, int]:
        return (channels, tokens) if self.role == "key" else (tokens, channels)

    def _grouped(self, ordered: Tensor) -> Tensor:
        """`[n, heads, groups, members, groups, members]` of `[n, heads, …]` in stored order."""
        members = self._ordered(self.group_channels, self.group_tokens)
        shape = [(size // count, count) for size, count in zip(ordered.shape[2:], members, strict=True)]
        return ordered.reshape(*ordered.shape[:2], *shape[0], *shape[1])

    def _gathered(self, scales: Tensor) -> Tensor:
        return scales[:, :, :, 0, :, 0]

    def _spread(self, scales: Tensor) -> Tensor:
        return scales[:, :, :, None, :, None]

    def _token_major(self, ordered: Tensor) -> Tensor:
        return ordered.transpose(2, 3) if self.role == "key" else ordered


@lru_cache(maxsize=64)
def hadamard(size: int, device: torch.device) -> Tensor:
    """The orthonormal, symmetric Hadamard matrix of Sylvester's construction, float32 `[size, size]`.

    Raises
    ------
    ValueError
        If the size is no power of two.
    """
    if not is_power_of_two(size):
        raise ValueError(f"size: expected a power of two, got {size}")
    with torch.inference_mode(False):  # kept for callers in any mode
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while matrix.shape[0] < size:
            matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
        return (matrix / math.sqrt(size)).to(device=device, dtype=torch.float32)


def is_power_of_two(number: int) -> bool:
    """Whether `number` is 1, 2, 4, 8 and so on."""
    return number > 0 and number & (number - 1) == 0


def _pack(codes: Tensor, per_byte: int) -> Tensor:
    bits = 8 // per_byte
    packed: Tensor | None = None
    for index, part in enumerate(codes.to(torch.uint8).chunk(per_byte, dim=-1)):
        shifted = part << (bits * index)
        packed = shifted if packed is None else packed | shifted
    assert packed is not None
    return packed


def _unpack(codes: Tensor, per_byte: int) -> Tensor:
    bits = 8 // per_byte
    return torch.cat([((codes >> (bits * index)) & (2**bits - 1)).float() for index in range(per_byte)], dim=-1)
