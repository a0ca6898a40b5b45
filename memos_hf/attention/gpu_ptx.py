"""PTX that turns codes into halves, for the GPU kernels: on full-rate instructions, which conversions are not.

Bits are set into the mantissa of a float of known size, which is then taken off again, without rounding.
"""

from __future__ import annotations

import struct

# Codes of a few bits are set into such a float, by bfloat16 or not: it, and the high one of its two bytes. In the low
# one, a 4 stands for 1.
BASES = {True: (32.0, 0x42), False: (256.0, 0x5C)}


def conversion(kind: str, place: int, bfloat16: bool, lowest: float | None, scaled: bool) -> str:
    """PTX that turns four codes in one register into four halves in two.

    Parameters
    ----------
    kind : {"int8", "fp8", "int4", "int2"}
    place : int
        Which of the codes in a byte is meant.
    bfloat16 : bool
        Whether to give these, or float16.
    lowest : float, optional
        What a code of 0 stands for. `None`: that comes as an operand, less the base of the float.
    scaled : bool
        Whether there is a factor to multiply with at the end.

    Returns
    -------
    str
        With operands `$0`, `$1`: the halves, in order; `$2`: the codes; `$3`: twice what a code of 0 stands for, if
        that is not known, and else anything; `$4`: twice the factor, if there is one.
    """
    lines = _eight_bits(kind, bfloat16) if kind in ("int8", "fp8") else _few_bits(kind, place, bfloat16, lowest)
    for index in range(2):
        if scaled and bfloat16:  # there is no plain product of two before compute capability 9
            lines += [f"fma.rn.bf16x2 n{index}, n{index}, $4, nothing;"]
        elif scaled:
            lines += [f"mul.f16x2 n{index}, n{index}, $4;"]
        lines += [f"mov.b32 ${index}, n{index};"]
    declared = [".reg .b32 a0, a1, b0, b1, c, n0, n1, nothing;", "mov.b32 nothing, 0x80008000;"]
    return "\n".join(["{", *declared, *lines, "}"])


def _eight_bits(kind: str, bfloat16: bool) -> list[str]:
    if kind == "fp8":  # exponent and mantissa in their places of the larger float, whose exponents count otherwise
        shift, bits, factor = (4, 0x07F0, 0x7B80) if bfloat16 else (1, 0x3F80, 0x5C00)
        lines = [f"mov.b32 c, {_pair(factor)};"]
        for index, selector in ((0, "0x1404"), (1, "0x3424")):
            lines += [
                f"prmt.b32 a{index}, $2, 0, {selector};",
                f"shr.b32 b{index}, a{index}, {shift};",
                f"and.b32 b{index}, b{index}, {_pair(bits)};",
                f"and.b32 a{index}, a{index}, 0x80008000;",
                f"or.b32 a{index}, a{index}, b{index};",
                f"fma.rn.bf16x2 n{index}, a{index}, c, nothing;" if bfloat16 else f"mul.f16x2 n{index}, a{index}, c;",
            ]
        return lines
    if not bfloat16:  # 1024 + code + 128
        add = "mov.b32 c, 0xE480E480;", "add.f16x2 n0, a0, c;", "add.f16x2 n1, a1, c;"
        return ["xor.b32 c, $2, 0x80808080;", *_spread_bytes("a", 0x64), *add]
    # The low seven bits on 128, less 128 for positive codes and 256 for negative ones.
    low = ["and.b32 c, $2, 0x7F7F7F7F;", *_spread_bytes("a", 0x43)]
    sign = ["and.b32 c, $2, 0x80808080;", *_spread_bytes("b", 0x43)]
    return [*low, *sign, "mov.b32 c, 0xBF80BF80;", *(f"fma.rn.bf16x2 n{i}, b{i}, c, a{i};" for i in range(2))]


def _few_bits(kind: str, place: int, bfloat16: bool, lowest: float | None) -> list[str]:
    bits, mask = (4, "0x3C3C3C3C") if kind == "int4" else (2, "0x0C0C0C0C")
    shift = 2 - place * bits
    lines = [f"shl.b32 c, $2, {shift};" if shift >= 0 else f"shr.b32 c, $2, {-shift};", f"and.b32 c, c, {mask};"]
    lines += _spread_bytes("a", BASES[bfloat16][1])
    added = ("$3", "$3") if lowest is None else ("b0", "b0")
    if lowest is not None:
        lines += [f"mov.b32 b0, {_pair(_half_bits(lowest - BASES[bfloat16][0], bfloat16))};"]
    if bfloat16:
        return [*lines, "mov.b32 c, 0x3F803F80;", *(f"fma.rn.bf16x2 n{i}, a{i}, c, {added[i]};" for i in range(2))]
    return [*lines, *(f"add.f16x2 n{i}, a{i}, {added[i]};" for i in range(2))]


def _spread_bytes(name: str, high: int) -> list[str]:
    """Each byte of `c` below a given one: four halves in two registers."""
    return [f"prmt.b32 {name}0, c, {high:#x}, 0x4140;", f"prmt.b32 {name}1, c, {high:#x}, 0x4342;"]


def _half_bits(number: float, bfloat16: bool) -> int:
    return int.from_bytes(struct.pack("<f", number)[2:] if bfloat16 else struct.pack("<e", number), "little")


def _pair(half: int) -> str:
    return f"{half * 0x10001:#x}"
