"""What a quantized cache has to do, in the plainest torch there is, for tests to compare with.

Nothing is shared with the cache that is tested but the codec, which has tests of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from memos_hf import KVQuantizationConfig
from memos_hf.blocks.codecs import BlockCodec

# A prompt that leaves so many whole blocks in a layer has them sealed as soon as another layer is updated.
PROMPT_BLOCKS = 4


class ReferenceLayer(DynamicLayer):
    """`keys` and `values` are all tokens, exact, as transformers keeps them; `sealed`, what the first ones decode to.

    A whole block is sealed at the start of an update that finds it and the residual window behind what is sealed.
    """

    def __init__(self, quantization: KVQuantizationConfig | None, block_size: int) -> None:
        super().__init__()
        self.quantization, self.block_size = quantization, block_size
        self.sealed: list[Tensor] = []  # K and V, decoded, [batch, heads, sealed tokens, head_dim]
        self.first_real: list[int] = []  # of each row; none: every row begins with its first token

    @property
    def sealed_tokens(self) -> int:
        return self.sealed[0].shape[2] if self.sealed else 0

    def seal(self, at_least: int = 1) -> None:
        if self.quantization is None or self.get_seq_length() == 0:
            return
        residual = -(-self.quantization.residual_tokens // self.block_size) * self.block_size
        due = (self.get_seq_length() - residual - self.sealed_tokens) // self.block_size
        for _ in range(due if due >= at_least else 0):
            first = self.sealed_tokens
            blocks = [half[:, :, first : first + self.block_size] for half in (self.keys, self.values)]
            before = self.sealed or [block[:, :, :0] for block in blocks]
            decoded = [codec.decode(codec.encode(block)[0]) for codec, block in zip(self.codecs(), blocks, strict=True)]
            self.sealed = [torch.cat(pair, dim=2) for pair in zip(before, decoded, strict=True)]

    def codecs(self) -> list[BlockCodec]:
        dims = self.keys.shape[3], self.values.shape[3]
        specs = self.quantization.specs(*dims, self.block_size)
        return [
            BlockCodec(spec, role, dim, self.block_size, half.dtype)
            for spec, role, dim, half in zip(specs, ("key", "value"), dims, (self.keys, self.values), strict=True)
        ]

    def read(self) -> tuple[Tensor, Tensor]:
        """K and V as attention is to see them."""
        seen = [self.keys.clone(), self.values.clone()]
        for states, exact, decoded in zip(seen, (self.keys, self.values), self.sealed, strict=False):
            states[:, :, : self.sealed_tokens] = decoded
            for row in range(states.shape[0]):
                first = self.first_real[row] if self.first_real else 0
                sinks = slice(first, first + self.quantization.sink_tokens)
                states[row, :, sinks] = exact[row, :, sinks]
        return seen[0], seen[1]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.seal()
        if self.get_seq_length() == 0:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.keys = torch.cat([self.keys, key_states], dim=2)
        self.values = torch.cat([self.values, value_states], dim=2)
        return self.read()

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.sealed = [half[:, :, : self.keys.shape[2]] for half in self.sealed]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if repeats > 1:
            self.seal()  # so that rows share it
        self.batch_select_indices(torch.arange(self.keys.shape[0]).repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.keys, self.values = self.keys[indices], self.values[indices]
        self.sealed = [half[indices] for half in self.sealed]
        self.first_real = [self.first_real[row] for row in indices] if self.first_real else []


class ReferenceCache(DynamicCache):
    """A :class:`ReferenceLayer` for each layer of full attention; those to be skipped stay exact."""

    def __init__(self, config: PretrainedConfig, quantization: KVQuantizationConfig, block_size: int) -> None:
        super().__init__(config=config)
        for index, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer:
                skipped = index in quantization.skip_layers
                self.layers[index] = ReferenceLayer(None if skipped else quantization, block_size)
        self.updated_last = 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        previous = self.layers[self.updated_last]
        if layer_idx != self.updated_last and isinstance(previous, ReferenceLayer):
            previous.seal(at_least=PROMPT_BLOCKS)
        self.updated_last = layer_idx
        return super().update(key_states, value_states, layer_idx)

    def begin_rows_at(self, first_real: list[int]) -> None:
        """Say which token of each row is its first one that is not padding."""
        for layer in self.layers:
            layer.first_real = first_real
