"""Compiles the GPU kernels for a GPU that need not be there, and checks that growing lengths need no more of them.

Run by test_gpu_kernel.py in a process of its own: where Triton interprets, it cannot compile.
"""

import torch
import triton
from attention_cases import Case
from triton.backends.compiler import GPUTarget

from memos_hf.attention import gpu, gpu_kernels, op


class NoDriver:
    """What the compiler asks a driver."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


class Compiled:
    """A kernel that is compiled instead of launched."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda **arguments: self.kernel.warmup(grid=grid, **arguments)

    @property
    def variants(self):
        return len(self.kernel.device_caches[0][0])


def main():
    triton.runtime.driver.set_active(NoDriver())
    kernels = [Compiled(gpu_kernels.attend), Compiled(gpu_kernels.combine)]
    gpu_kernels.attend, gpu_kernels.combine = kernels
    gpu._processors = lambda device: 132
    counts = []
    for entries, tail in [(3, 11), (1, 1), (2, 16), (17, 33), (300, 5)]:
        # The head dims of the tail buffer change its strides: with the tokens, but in steps of 16.
        case = Case(block=128, key_dim=64, value_dim=64, entries=entries, tail=tail, batch=1, dtype=torch.bfloat16)
        gpu.decode_attention(*case.arguments())
        counts.append([kernel.variants for kernel in kernels])
    assert counts == [[1, 1]] * len(counts), counts
    codecs = ("int4 channel 32 hadamard", "int2 token 32 hadamard")
    gpu.decode_attention(*Case(codecs, block=128, key_dim=64, value_dim=64, batch=1).arguments())
    assert [kernel.variants for kernel in kernels] == [2, 2]
    # Parts, with a tail or without, need another `combine` and nothing else.
    op._kernel_for = lambda *arguments: gpu.decode_attention
    for tail in (None, case.tail):
        op.partial_attention(case.query, tail, case.sealed, case.sinks, None, 0.25)
        counts.append([kernel.variants for kernel in kernels])
    assert counts[-2:] == [[2, 3]] * 2, counts[-2:]


if __name__ == "__main__":
    main()
