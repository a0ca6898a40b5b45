"""The PTX conversions of the GPU kernels, executed instruction by instruction."""

import re

import pytest
import torch

from memos_hf.attention.gpu_ptx import BASES, conversion

BITS = {"int8": 8, "fp8": 8, "int4": 4, "int2": 2}
WORD = 0xFFFFFFFF
DTYPES = {True: torch.bfloat16, False: torch.float16}


class Machine:
    """Registers of 32 bits, many at a time: int64 tensors."""

    def __init__(self, **operands):
        self.registers = operands

    def run(self, ptx):
        for line in ptx.split("\n"):
            if line.startswith(".reg") or line in "{}":
                continue
            opcode, target, *sources = re.match(r"(\S+) (.*);$", line).expand(r"\1, \2").split(", ")
            self.registers[target] = self.result(opcode.split("."), [self.value(source) for source in sources])
        return self.registers

    def value(self, source):
        return self.registers[source] if source[0].isalpha() or source[0] == "$" else torch.tensor(int(source, 0))

    def result(self, opcode, sources):
        name, kind = opcode[0], opcode[-1]
        if name in ("fma", "mul", "add"):
            return self.halves(name, torch.bfloat16 if kind == "bf16x2" else torch.float16, sources)
        assert kind == "b32"
        first, second = (*sources, None)[:2]
        if name == "prmt":
            both = (second << 32) | first
            chosen = [(both >> (8 * (int(sources[2]) >> (4 * index) & 7))) & 0xFF for index in range(4)]
            return sum(byte << (8 * index) for index, byte in enumerate(chosen))
        return {
            "mov": lambda: first,
            "and": lambda: first & second,
            "or": lambda: first | second,
            "xor": lambda: first ^ second,
            "shl": lambda: (first << second) & WORD,
            "shr": lambda: first >> second,
        }[name]()

    def halves(self, name, dtype, sources):
        result = 0
        for shift in (0, 16):
            numbers = [half(source >> shift & 0xFFFF, dtype).double() for source in sources]
            exact = numbers[0] + numbers[1] if name == "add" else numbers[0] * numbers[1]
            exact = exact + numbers[2] if name == "fma" else exact
            result = result | (exact.to(dtype).view(torch.int16).long() & 0xFFFF) << shift
        return result


def half(bits, dtype):
    return bits.to(torch.int32).to(torch.int16).view(dtype)


def pair(number, dtype):
    return torch.tensor((int(torch.tensor(number, dtype=dtype).view(torch.int16)) & 0xFFFF) * 0x10001)


def codes_of(kind, place):
    """All bytes that are stored, and what the codes in them stand for."""
    stored = torch.arange(256, dtype=torch.uint8)
    if kind == "int8":
        return stored, stored.view(torch.int8).double()
    if kind == "fp8":
        numbers = stored.view(torch.float8_e4m3fn).double()
        stored, numbers = stored[numbers.isfinite()], numbers[numbers.isfinite()]
        return torch.cat([stored, stored[:2]]), torch.cat([numbers, numbers[:2]])  # to whole words
    return stored, ((stored >> (BITS[kind] * place)) & (2 ** BITS[kind] - 1)).double()


@pytest.mark.parametrize("factor", [None, 0.375, 0.3])
@pytest.mark.parametrize("bfloat16", [True, False])
@pytest.mark.parametrize("kind", BITS)
def test_every_code_becomes_its_number(kind, bfloat16, factor):
    dtype = DTYPES[bfloat16]
    lowest = {"int4": (-7.5, None), "int2": (-1.5, None)}.get(kind, (0.0,))
    for place in range(8 // BITS[kind]):
        stored, numbers = codes_of(kind, place)
        words = stored.view(torch.int32).long() & WORD
        for known in lowest:
            for zero in [known] if known is not None else [-128.0, -31.75, 0.0, 127.0]:
                if kind == "int4" and zero == -31.75:
                    continue  # its zero points are whole
                ptx = conversion(kind, place, bfloat16, known, factor is not None)
                operands = {"$2": words, "$3": words if known is not None else pair(zero - BASES[bfloat16][0], dtype)}
                if factor is not None:
                    operands["$4"] = pair(factor, dtype)
                registers = Machine(**operands).run(ptx)
                low, high = registers["$0"], registers["$1"]
                output = torch.stack([low & 0xFFFF, low >> 16, high & 0xFFFF, high >> 16], dim=1).flatten()
                expected = numbers + zero
                if factor is not None:
                    expected = expected * torch.tensor(factor, dtype=dtype).double()
                assert torch.equal(half(output, dtype).double(), expected.to(dtype).double()), (place, zero)
