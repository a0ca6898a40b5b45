"""`MemOSCache`: which layer class each model layer gets, and the operations on the whole cache."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin, StaticLayer

from . import model_config
from .blocks.budget import Lease
from .config import CacheOptions, KVQuantizationConfig, Layout, OffloadConfig, Preset, refuse_combinations
from .layers import BlockLayer, BufferedLayer, ContiguousLayer, OffloadedLayer, convert
from .layers.base import check_ceiling
from .layers.blocks import PROMPT_BLOCKS
from .layers.static import StaticRoom, prepare_static
from .layers.upstream import UpstreamLayer, adapted
from .placement import expected_states
from .report import CacheStats, MemoryReport, cache_stats, format_bytes, memory_report
from .show.html import cache_html
from .store import file as store_file
from .store.fingerprint import Fingerprint
from .store.places import AnyPath


class MemOSCache(DynamicCache):  # type: ignore[misc]
    """A KV cache for `generate` and for model calls, preallocated, head-major, growing by a factor.

    It goes wherever transformers takes a `DynamicCache` and gives the same tokens::

        cache = MemOSCache(model.config)
        model.generate(**inputs, past_key_values=cache)     # or cache=cache, from transformers 5.24 on

    Full-attention layers become a :class:`~memos_hf.layers.ContiguousLayer`, sliding and chunked ones a
    :class:`~memos_hf.layers.SlidingLayer`, or with `quantization` a :class:`~memos_hf.layers.BlockLayer` and a
    :class:`~memos_hf.layers.SlidingBlockLayer`; every other kind stays the class that transformers made for it.

    Parameters
    ----------
    config : PretrainedConfig, optional
        The model's config, by position or by name; of a multimodal config the text part is used. Without one, layers
        of full attention are added as they are updated.
        As in `DynamicCache`, the first argument may instead be an iterable of per-layer `(keys, values)` or
        `(keys, values, sliding_window)`, each of shape `[batch, heads, tokens, head_dim]`.
    offloading, offload_only_non_sliding : bool
        `DynamicCache`'s: keep layers in host memory and bring them to the accelerator one ahead.
    ddp_cache_data : iterable, optional
        Per-layer data by name, as in `DynamicCache`.
    initial_capacity : int, optional
        Tokens allocated at the first update: 256 by default, or `max_cache_len` where that is lower. A longer first
        prompt gets its length and this many more.
    max_cache_len : int, optional
        Hard ceiling in tokens of full attention. An update beyond it is refused whole with a `ValueError`.
    growth_factor : float
        What capacity is multiplied by when it runs out.
    layout : {"head_major", "seq_major"}
        Order in memory; the second is there to be measured against.
    quantization : KVQuantizationConfig or {"int8", "int4", "int2", "fp8"}, optional
        Layers keep older tokens in sealed blocks, encoded once, that attention reads in place. Sliding windows do if
        they are longer than the residual window and a block, 256 tokens by default; shorter ones, in which nothing
        would ever be sealed, stay in full precision.
    offload : OffloadConfig, optional
        Keep blocks, encoded or not, within a budget of the device, and the others in host memory and on disk.
        Attention is exact, and reads what is not on the device through staging buffers; with `active_blocks` it reads
        the blocks that matter most.
    block_size : int
        Tokens in a sealed block, a power of two of at least 8.
    fused_attention : bool
        On the CPU, compute a single token's `sdpa` attention over full-precision buffers by the compiled kernel that
        reads blocks (extra `cpu`): faster from some hundred tokens on, equal within float tolerance.
    static : bool
        Fixed shapes of `max_cache_len` tokens for `torch.compile` and CUDA graphs, on transformers' static layers and
        with `StaticCache`'s semantics; a full cache is refused before anything is written.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was expected and what came.
    """

    # Makes the layers that are added as they are updated; `None` where the config said which there are.
    layer_class_to_replicate: Any
    layers: list[Any]

    def __init__(
        self,
        source: PretrainedConfig | Iterable[tuple[Tensor | None, ...]] | None = None,
        /,
        config: PretrainedConfig | None = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
        *,
        ddp_cache_data: Iterable[tuple[Tensor | None, ...]] | None = None,
        initial_capacity: int | None = None,
        max_cache_len: int | None = None,
        growth_factor: float = 1.5,
        layout: Layout = "head_major",
        quantization: KVQuantizationConfig | Preset | None = None,
        offload: OffloadConfig | None = None,
        block_size: int = 128,
        fused_attention: bool = False,
        static: bool = False,
    ) -> None:
        config, data = _config_and_data(source, config, ddp_cache_data)
        self.options = CacheOptions(
            initial_capacity=initial_capacity,
            max_cache_len=max_cache_len,
            growth_factor=growth_factor,
            layout=layout,
            quantization=KVQuantizationConfig.of(quantization) if quantization is not None else None,
            offload=offload,
            block_size=block_size,
            fused_attention=fused_attention,
            static=static,
            attention=model_config.attention_of(config) if config is not None else None,
        )
        _check_use(self.options, config, data, offloading)
        if offload is not None:
            self.options = replace(self.options, lease=offload.lease())
        layers = model_config.layers_for(config, self.options) if config is not None else []
        # The parent's constructor with a list of layers, which is what `DynamicCache` itself ends in.
        super(DynamicCache, self).__init__(
            layers=layers, offloading=offloading, offload_only_non_sliding=offload_only_non_sliding
        )
        if config is None:
            # Only says that layers are added as they are updated: `update` does so itself, as it knows their index.
            self.layer_class_to_replicate = ContiguousLayer
        self._updated_last: int | None = None
        self._has_blocks = self.options.quantization is not None or offload is not None
        self._owners = 1  # 0: released
        self._step: list[tuple[int, int]] = []  # of the layers that have its tokens: index and how many they are
        self._torn: BaseException | None = None  # why layers differ in length
        # What is known of the model whose keys and values these are; goes into files.
        self.fingerprint = Fingerprint() if config is None else Fingerprint.of_config(config)
        self._shares_layers = config is not None and model_config.shares_layers(config)
        self._static_room = StaticRoom(max_cache_len) if static and max_cache_len is not None else None
        with self._exclusive():
            for layer_idx, states in enumerate(data or ()):
                self._fill_layer(layer_idx, states)

    @classmethod
    def for_model(cls, model: PreTrainedModel, batch_size: int | None = None, **options: Any) -> MemOSCache:
        """A cache for `model`, each layer on the device where accelerate put its attention.

        Parameters
        ----------
        model : PreTrainedModel
            Placed or not; its `hf_device_map` is followed.
        batch_size : int, optional
            Allocate the buffers now, before the first token, for this many rows. Heads and head dims are then taken
            from the config, and taken anew from the first update if that differs.
        **options
            As for the constructor.

        Raises
        ------
        TypeError, ValueError
            If `model` is no model, or an argument is wrong.
        """
        if not isinstance(getattr(model, "config", None), PretrainedConfig):
            raise TypeError(f"model: expected a transformers model, got {type(model).__name__}")
        if batch_size is not None and (
            isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1
        ):
            raise ValueError(f"batch_size: expected an int of at least 1 or None, got {batch_size!r}")
        cache = cls(model.config, **options)
        cache.fingerprint = Fingerprint.of_model(model)
        with cache._exclusive():
            for layer_idx, states in expected_states(model, batch_size) if batch_size is not None else ():
                layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
                if not getattr(layer, "supports_early_init", False):
                    continue
                if cache.options.static:
                    prepare_static(layer, states, states)
                elif isinstance(layer, BufferedLayer):
                    layer.lazy_initialization(states, states)
        return cache

    @classmethod
    def from_cache(cls, cache: DynamicCache, **options: Any) -> MemOSCache:
        """A cache with a copy of what a `DynamicCache` (or another `MemOSCache`) holds.

        Parameters
        ----------
        cache : DynamicCache
        **options
            As for the constructor. `config=model.config` tells a quantized cache which attention the model has; without
            it blocks are read in place by `sdpa` alone, and flex attention, which is compiled, fails.

        Raises
        ------
        TypeError
            If `cache` is of another kind.
        ValueError
            If it is static, or is to be.
        """
        if not isinstance(cache, DynamicCache):
            raise TypeError(f"cache: expected a DynamicCache or MemOSCache, got {type(cache).__name__}")
        if options.get("static") or (isinstance(cache, MemOSCache) and cache.options.static):
            raise ValueError("from_cache: a static cache is filled by the model and cannot be converted")
        result = cls(**options)
        if result.options.attention is None and isinstance(cache, MemOSCache):
            result.options = replace(result.options, attention=cache.options.attention)
        with result._exclusive():
            result.layers = [
                convert.from_dynamic(layer, result.options, layer_idx) for layer_idx, layer in enumerate(cache.layers)
            ]
        if cache.layer_class_to_replicate is None:
            result.layer_class_to_replicate = None
        if isinstance(cache, MemOSCache):
            result.fingerprint = cache.fingerprint
        return result

    def save(self, path: AnyPath, *, input_ids: Tensor | None = None, model: PreTrainedModel | None = None) -> None:
        """Save all that is cached in one file, encoded blocks as they are, about as large as what is valid.

        The file is safetensors with a JSON document, every byte of it under a checksum; nothing is pickled. It appears
        at `path` whole: should the process be killed, what was there before is there still, and what it left behind is
        removed at the next save into that folder.

        Beside the cache goes what is known of its model, so that `load` can refuse another one. Of a cache from
        `for_model` that is its config, dtype, a sample of its weights and its active adapters, as they were when the
        cache was made. Of `MemOSCache(config)` it is the config alone, and without a config nothing: `model` says it
        then. Of an `EncoderDecoderCache`, save its two caches.

        Parameters
        ----------
        path : str or path-like
            A file in a folder that exists, or a URL that fsspec knows (`s3://`, `gs://`, `hf://`, …).
        input_ids : Tensor, optional
            Ids of the cached tokens, `[batch, tokens]`, for :func:`memos_hf.store.load_input_ids`; ids behind them, as
            the last one that `generate` returns, are left out.
        model : PreTrainedModel, optional
            The model that computed the cache, as it is now.

        Raises
        ------
        OSError
            If it cannot be written; what was at `path` is there still.
        TypeError, ValueError
            If `input_ids` are not those of what is cached, or `model` is no model.
        """
        store_file.save(self, path, input_ids=input_ids, model=model)

    @classmethod
    def load(cls, path: AnyPath, model: PreTrainedModel, *, verify: bool = True, **options: Any) -> MemOSCache:
        """A cache from a file that `save` wrote, each layer on the device where `model` computes its attention.

        All that the file says is checked before anything is built: format, shapes, lengths, and config, dtype, weights
        and adapters of the model as far as `save` knew them. Files of other kinds, pickles and those of `torch.save`
        among them, are refused unread, as to unpickle a file is to run what its author put there.

        Parameters
        ----------
        path : str or path-like
            A file, or a URL that fsspec knows.
        model : PreTrainedModel
            The model to go on with.
        verify : bool
            Hold each tensor against its checksum before it is used. Without, a damaged tensor goes unnoticed.
        **options
            As for the constructor, in place of those that the cache was saved with; `offload` is not saved.
            `quantization`, `block_size` and `static` say in what form the file is, and must be the same if they are
            given.

        Raises
        ------
        OSError
            If the file cannot be read.
        CacheFileError
            A `ValueError`: if it is no such file, is damaged or cut off, or is that of another model, saying which of
            its config, number of layers or heads, dtype, weights or adapters differ.
        ValueError, TypeError
            If `options` are not possible or not those of the file.
        """
        return store_file.load(cls, path, model, verify=verify, options=options)

    def quantize(self, quantization: KVQuantizationConfig | Preset) -> None:
        """Turn this cache, filled or not, into a quantized one, a layer at a time.

        Where rows are left-padded, padding counts as their sinks, as the cache has seen no mask; a cache that is
        quantized from the start finds each row's first real tokens.

        Parameters
        ----------
        quantization : KVQuantizationConfig or {"int8", "int4", "int2", "fp8"}

        Raises
        ------
        ValueError
            If it is quantized already, static, or its keys and values cannot be encoded so; it is then as it was.
        RuntimeError
            If it was released, or is torn.
        """
        self._check_usable()
        if self.options.quantization is not None:
            raise ValueError(f"quantize: the cache is quantized already, by {self.options.quantization}")
        if self.options.offload is not None:
            raise ValueError("quantize: expected a cache that is not offloaded; those are made with quantization=")
        options = replace(self.options, quantization=KVQuantizationConfig.of(quantization))
        refuse_combinations(quantization=True, offloading=self.offloading)
        exact = {index: layer for index, layer in enumerate(self.layers) if convert.is_exact(layer)}
        for layer_idx, layer in exact.items():
            convert.check_quantizable(layer, options, layer_idx)
        for layer_idx, layer in exact.items():
            self.layers[layer_idx] = convert.from_dynamic(layer, options, layer_idx)
            layer.free()
        self.options, self._has_blocks = options, True

    def to_dynamic(self) -> DynamicCache:
        """A `DynamicCache` with a copy of what this cache holds, decoded where it is encoded.

        Raises
        ------
        ValueError
            If the cache is static.
        """
        if self.options.static:
            raise ValueError("to_dynamic: a static cache cannot be converted")
        result = DynamicCache()
        with self._exclusive():
            result.layers = [convert.to_dynamic(layer) for layer in self.layers]
        if self.layer_class_to_replicate is None:
            result.layer_class_to_replicate = None
        return result

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store K and V, `[batch, heads, new_tokens, head_dim]`, of one layer; return all that it may attend to.

        What is returned, `[batch, heads, tokens, head_dim]` each, holds until the next call. Where there are blocks, it
        is a stand-in of that shape that attention reads in place, and that every other operation decodes.

        Raises
        ------
        ValueError, TypeError, RuntimeError
            If the ceiling is reached (by any layer: the first layer's update checks for all), or batch, heads, head
            dim, dtype or device differ from what the layer holds. The cache is then as it was.
        """
        # Compilers would take tables and counts of blocks for what they were when they were last seen.
        update = self._update_untraced if self._has_blocks else self._update_checked
        return update(key_states, value_states, layer_idx, *args, **kwargs)

    def _update_checked(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        while self.layer_class_to_replicate is not None and len(self.layers) <= layer_idx:
            self.layers.append(convert.full_attention_layer(self.options, len(self.layers)))
        self._check_room(key_states.shape[-2], layer_idx)
        with self._exclusive():
            if self.options.lease is None:
                return self._update(key_states, value_states, layer_idx, *args, **kwargs)
            return self._update_offloaded(self.options.lease, key_states, value_states, layer_idx, *args, **kwargs)

    _update_untraced = torch.compiler.disable(_update_checked)  # type: ignore[no-untyped-call]

    def _update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.options.static:
            prepare_static(self.layers[layer_idx], key_states, value_states)
        elif self._has_blocks:
            self._seal_prompt(key_states, value_states, layer_idx)
            if key_states.is_cuda:
                self._encode_ahead(layer_idx + 1)
        states: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._has_blocks:
            self._updated_last = layer_idx
        return states

    def _update_offloaded(
        self, lease: Lease, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store K and V of a layer, or, if blocks cannot be written below, nothing of this step in any layer."""
        tokens = key_states.shape[-2]
        if self._updated_last is None or layer_idx <= self._updated_last:
            self._step = []
            layers = [layer for layer in self.layers if isinstance(layer, OffloadedLayer)]
            for layer in layers:
                layer.undo_step = WeakMethod(self._undo_step)
            lease.begin_step(tokens, (layer.blocks_due(tokens) for layer in layers))
        try:
            states = self._update(key_states, value_states, layer_idx, *args, **kwargs)
        except OSError as error:
            self._undo_step(error)
            raise
        self._step.append((layer_idx, tokens))
        return states

    def _undo_step(self, error: BaseException) -> None:
        """Take the tokens of a step that cannot be finished out of the layers that have them.

        Where one cannot give them back, the layers differ from then on, and the cache is of no use until it is reset.
        """
        step, self._step = [(adapted(self.layers[layer_idx]), tokens) for layer_idx, tokens in self._step], []
        try:
            for layer, tokens in step:
                layer.check_crop(-tokens)
        except RuntimeError:
            self._torn = error
        if self._has_recurrent_states():
            self._torn = error
        if self._torn is None:
            for layer, tokens in step:
                layer.crop(-tokens)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """While layers are read or changed: an offloaded cache does not move out. A torn one is refused."""
        self._check_usable()
        if self.options.lease is None:
            yield
        else:
            with self.options.lease.lock:
                self.options.lease.changed()
                yield

    def _check_usable(self) -> None:
        """Raise if the cache was released or is torn."""
        if self._owners == 0:
            raise RuntimeError("the cache was released: its memory is free, and it cannot be used any more")
        if self._torn is not None:
            raise RuntimeError(
                f"the cache is torn: a step failed when some layers had its tokens ({self._torn}); reset it"
            ) from self._torn

    def fork(self, repeats: int = 1) -> MemOSCache:
        """A cache with the same tokens, which goes on by itself. What both hold is held once.

        Takes as long for many tokens as for few: sealed blocks are shared, and the open tail is copied by whichever of
        the two writes to it first. Contiguous layers of this cache become layers of blocks that lie where the tokens
        are; attention over blocks gives the same up to float tolerance. Recurrent states are copied. Threads may each
        use a fork of their own.

        Parameters
        ----------
        repeats : int
            Repeat every row of the fork so many times, as `batch_repeat_interleave` does: `fork(8)` of a cache with one
            prompt is for eight samples, which hold the prompt once.

        Raises
        ------
        ValueError
            If the cache is static, or `repeats` is not an int of at least 1.
        """
        _check_repeats(repeats)
        if self.options.static:
            raise ValueError("fork: a static cache has buffers that cannot be shared")
        with self._exclusive():
            layers = [convert.in_blocks(layer) for layer in self.layers]
            twin = copy.copy(self)
            twin.layers = [convert.forked(layer) for layer in layers]
            self.layers = layers
            self._has_blocks = twin._has_blocks = any(isinstance(layer, BlockLayer) for layer in layers)
            twin._owners, twin._step = 1, []
        if repeats > 1:
            twin.batch_repeat_interleave(repeats)
        return twin

    def acquire(self) -> MemOSCache:
        """Count one more owner, who calls :meth:`release` when done. Returns the cache.

        Raises
        ------
        RuntimeError
            If it was released, or is torn.
        """
        with self._exclusive():
            self._owners += 1
        return self

    def release(self) -> None:
        """Count one owner less. When none is left, the memory is free at once and the cache cannot be used any more.

        A cache has one owner when it is made. `with cache:` releases at the end; so does dropping the last reference.

        Raises
        ------
        RuntimeError
            If it was released before.
        """
        if self._owners == 0:
            raise RuntimeError("release: the cache was released before, as often as it was acquired")
        self._owners -= 1
        if self._owners == 0:
            layers, self.layers, self._torn = self.layers, [], None
            self.options = replace(self.options, lease=None)
            for layer in layers:
                if isinstance(layer, BufferedLayer):
                    layer.free()

    def __enter__(self) -> MemOSCache:
        with self._exclusive():
            return self

    def __exit__(self, *exception: object) -> None:
        if self._owners > 0:
            self.release()

    def offload_all(self) -> None:
        """Move everything off the device: blocks and open tails of an offloaded cache. It comes back when it is used.

        Raises
        ------
        ValueError
            If the cache was made without `offload`.
        OSError
            If it cannot be written; what did not move stays where it is.
        """
        with self._exclusive():
            for layer in self._offloaded_layers("offload_all"):
                layer.move_out()

    def prefetch_all(self) -> None:
        """Bring as much of an offloaded cache back to the device as its budget allows. Raises as `offload_all` does."""
        with self._exclusive():
            for layer in self._offloaded_layers("prefetch_all"):
                layer.come_back()

    def _offloaded_layers(self, method: str) -> list[OffloadedLayer]:
        if self.options.lease is None:
            raise ValueError(f"{method}: expected a cache made with offload=OffloadConfig(...)")
        return [layer for layer in self.layers if isinstance(layer, OffloadedLayer)]

    def _seal_prompt(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> None:
        """Seal what a long prompt left in the layer before: one layer at a time is in full precision."""
        if self._shares_layers or self._updated_last in (None, layer_idx):
            return  # layers that share may read the one before again in the same step, and are to read it exact
        previous, layer = self.layers[self._updated_last], self.layers[layer_idx]
        least = 1 if self.options.lease is not None else PROMPT_BLOCKS  # within a budget tails are to be short
        if isinstance(previous, BlockLayer) and previous.due_blocks >= least:
            if isinstance(layer, BufferedLayer):
                layer.check_update(key_states, value_states)  # a refused update seals nothing
            previous.seal()

    def _encode_ahead(self, layer_idx: int) -> None:
        """Begin to encode what the next layer is about to seal, while the device computes this one."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if isinstance(layer, BlockLayer):
            layer.encode_ahead()

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Store the convolution state of a linear-attention layer; see `Cache.update_conv_state`."""
        states: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        UpstreamLayer(self.layers[layer_idx]).leave_inference_mode()
        return states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Store the recurrent state of a linear-attention layer; see `Cache.update_recurrent_state`."""
        states: Tensor = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)
        UpstreamLayer(self.layers[layer_idx]).leave_inference_mode()
        return states

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and first position of the keys that the next update of `query_length` tokens returns.

        Models ask before their first layer runs. So where something is written before the first attention layer's
        update (recurrent states), or where that update is compiled, the ceiling is checked here already; and whether
        the cache can be used at all.
        """
        self._check_usable()
        if self._static_room is not None:
            static = self._first_full_static_layer()
            if static is not None:
                self._static_room.check_announced(static, query_length)
        elif self.options.max_cache_len is not None and self._has_recurrent_states():
            self._check_room(query_length, self._first_attention_layer)
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The ceiling in tokens, -1 where there is none; of layer `layer_idx`, what transformers says (the window)."""
        if layer_idx is None and not self.options.static:
            return self.options.max_cache_len or -1
        length: int = super().get_max_length(layer_idx)
        return length

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """For each layer its keys, values and window (a tensor, or `None`): copies, which later updates leave alone."""
        for layer in self.layers:
            keys, values = layer.copied() if isinstance(layer, BufferedLayer) else (layer.keys, layer.values)
            yield keys, values, getattr(layer, "_sliding_window_tensor", None)

    def reset(self) -> None:
        """Forget all tokens; preallocated memory is kept for the next prompt."""
        self._torn, self._step = None, []
        with self._exclusive():
            for layer in map(adapted, self.layers):
                layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every layer, or, if one of them cannot, of none.

        Parameters
        ----------
        tokens_to_remove : int
            0 or negative; where there are fewer tokens, none is left.

        Raises
        ------
        ValueError
            If the argument is positive.
        RuntimeError
            If a layer no longer has what the shorter cache needs: a sliding window that was not recording, a
            recurrent state.
        """
        layers = [adapted(layer) for layer in self.layers]
        with self._exclusive():
            for layer in layers:
                layer.check_crop(tokens_to_remove)
            for layer in layers:
                layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row `i` of the batch what row `beam_idx[i]` was. Rows share blocks.

        Parameters
        ----------
        beam_idx : Tensor
            int64 `[rows]`, on any device; not kept.

        Raises
        ------
        IndexError, RuntimeError
            If there is no such row; nothing is changed then.
        """
        with self._exclusive():
            for layer in map(adapted, self.layers):
                layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch `repeats` times, side by side; recurrent states too.

        Rows share what is in whole blocks and, where one row is repeated, the tail behind them too. Contiguous layers
        become layers of blocks, which lie where the tokens are, and blocks that are due are sealed now, once.

        Raises
        ------
        ValueError
            If `repeats` is not an int of at least 1.
        RuntimeError
            If the cache is static.
        """
        _check_repeats(repeats)
        with self._exclusive():
            if repeats > 1 and not self.options.static:
                self.layers = [convert.in_blocks(layer) for layer in self.layers]
                self._has_blocks = any(isinstance(layer, BlockLayer) for layer in self.layers)
                for layer in self.layers:
                    if isinstance(layer, BlockLayer):
                        layer.seal()
            for layer in map(adapted, self.layers):
                layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`; recurrent states too.

        Parameters
        ----------
        indices : Tensor
            int64 `[rows]`, or a boolean mask over the batch, on any device; not kept.

        Raises
        ------
        IndexError, RuntimeError
            If there is no such row, or the mask is for another number of rows; nothing is changed then.
            If the cache is static.
        """
        with self._exclusive():
            for layer in map(adapted, self.layers):
                layer.batch_select_indices(indices)

    @property
    def is_compileable(self) -> bool:
        """True for `static=True` only: `generate` then compiles its decoding steps where it can."""
        return self.options.static and bool(super().is_compileable)

    def memory(self) -> MemoryReport:
        """Bytes held, from the storages themselves, by device: of what is valid, of all that is allocated, of what
        others hold too.
        """
        return memory_report(self.layers, self.options.lease)

    @property
    def stats(self) -> CacheStats:
        """Counters since the cache was made; a snapshot that does not change later."""
        return cache_stats(self.layers)

    def __repr__(self) -> str:
        kinds = ", ".join(
            f"{count} {kind}" for kind, count in Counter(type(layer).__name__ for layer in self.layers).items()
        )
        memory = self.memory()
        return (
            f"{type(self).__name__}({kinds or 'no layers yet'}; {self._tokens()} tokens, "
            f"{format_bytes(memory.used_bytes)} of {format_bytes(memory.allocated_bytes)} used)"
        )

    def _repr_html_(self) -> str:
        facts = [self._length(), self.options.mode]
        if self._owners == 0:
            facts.append("released")
        if self._torn is not None:
            facts.append(f"torn, to be reset: {self._torn}")
        return cache_html(type(self).__name__, facts, self.memory(), self.stats)

    def _length(self) -> str:
        """Valid tokens, and how many fit where the buffers are contiguous and so have one capacity."""
        idx = self._first_attention_layer
        layer = None if idx is None else self.layers[idx]
        if isinstance(layer, (ContiguousLayer, StaticLayer)) and layer.is_initialized and not layer.is_sliding:
            capacity = layer.buffer.capacity if isinstance(layer, ContiguousLayer) else layer.max_cache_len
            return f"{self._tokens()} of {capacity} tokens"
        return f"{self._tokens()} tokens"

    @property
    def _first_attention_layer(self) -> int | None:
        return next((idx for idx, layer in enumerate(self.layers) if isinstance(layer, CacheLayerMixin)), None)

    def _has_recurrent_states(self) -> bool:
        return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers)

    def _tokens(self) -> int:
        idx = self._first_attention_layer
        return 0 if idx is None else int(self.layers[idx].get_seq_length())

    def _check_room(self, new_tokens: int, layer_idx: int | None) -> None:
        """Raise if any layer would pass the ceiling, before the first layer stores anything."""
        if self.options.max_cache_len is None or layer_idx != self._first_attention_layer:
            return
        static = self._first_full_static_layer()
        if self._static_room is not None and static is not None:
            self._static_room.check(static, new_tokens)
        elif self._static_room is None:
            for layer in self.layers:
                if isinstance(layer, BufferedLayer):
                    layer.check_room(new_tokens)
                elif isinstance(layer, CacheLayerMixin):
                    check_ceiling(self.options.max_cache_len, layer.get_seq_length(), new_tokens)

    def _first_full_static_layer(self) -> Any:
        """The length of one is that of all; a static window drops what is too much and is never full."""
        return next((layer for layer in self.layers if isinstance(layer, StaticLayer) and not layer.is_sliding), None)

    def _fill_layer(self, layer_idx: int, states: Any) -> None:
        """Put one layer of `DynamicCache`'s per-layer data where it belongs."""
        if not isinstance(states, (tuple, list)) or len(states) not in (2, 3):
            raise TypeError(
                f"first argument: expected (keys, values) or (keys, values, window) for layer {layer_idx}, "
                f"got {states!r}"
            )
        keys, values, window = (*states, None)[:3]
        if self.layer_class_to_replicate is not None:
            full = convert.full_attention_layer(self.options, layer_idx)
            self.layers.append(full if window is None else convert.sliding_layer(self.options, layer_idx, int(window)))
        if keys is not None and values is not None:
            self.layers[layer_idx].update(keys, values)


def _check_repeats(repeats: int) -> None:
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"repeats: expected an int of at least 1, got {repeats!r}")


def _config_and_data(source: Any, config: Any, data: Any) -> tuple[PretrainedConfig | None, Any]:
    """Sort out the first argument, which is a config or, as in `DynamicCache`, per-layer data."""
    if isinstance(source, PretrainedConfig):
        if config is not None:
            raise TypeError("config: given twice, by position and by name")
        config = source
    elif source is not None:
        if data is not None:
            raise TypeError("ddp_cache_data: given twice, by position and by name")
        data = source
    if config is not None and not isinstance(config, PretrainedConfig):
        raise TypeError(f"config: expected a PretrainedConfig, such as model.config, got {type(config).__name__}")
    if data is not None and (isinstance(data, (str, bytes, Mapping)) or not isinstance(data, Iterable)):
        raise TypeError(
            "first argument: expected a PretrainedConfig, such as model.config, or an iterable of per-layer "
            f"(keys, values), got {type(data).__name__}"
        )
    return config, data


def _check_use(options: CacheOptions, config: PretrainedConfig | None, data: Any, offloading: bool) -> None:
    """Refuse what options, config and machine do not allow together."""
    if options.static and config is None:
        raise ValueError("static=True: expected a config to take the layers from, got None")
    refuse_combinations(
        static=options.static,
        quantization=options.quantization is not None,
        offload=options.offload is not None,
        offloading=offloading,
        per_layer_data=data is not None,
        flash_attention=config is not None and model_config.asks_for_flash(config),
    )
    if offloading and torch.accelerator.current_accelerator() is None:
        raise RuntimeError("offloading=True: moves layers between host memory and an accelerator, and there is none")
