"""`attn_implementation="memos"`: encoded blocks read in place by models that transformers gives no sdpa.

Soft-capped scores (Gemma 2) and learned sinks (gpt-oss) have no place in `scaled_dot_product_attention`, so such models
run eager attention, which decodes. Under this name they call :func:`memos_attention`, which hands both to the kernels.
Models whose code computes scores by itself (BLOOM, MPT, GPT-Neo) are followed; see :mod:`memos_hf.attention.scores`.
As with sdpa, attention weights cannot be returned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import eager_mask
from transformers.models.gpt_neo import modeling_gpt_neo

from . import lazy, scores

NAME = "memos"
# Transformers compiles this one as a whole: keys and values should come to it plain.
FLEX = "flex_attention"


def memos_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' interface calls it (`AttentionInterface`).

    Parameters
    ----------
    module : Module
        The attention layer.
    query, key, value : Tensor
        `[batch, heads or kv_heads, tokens, head_dim]`; key and value as the cache returned them.
    attention_mask : Tensor, optional
        Additive, `[batch, 1, queries, tokens]`.
    scaling : float, optional
        Factor of the scores; by default `head_dim ** -0.5`.
    dropout : float
    softcap : float, optional
        Scores become `softcap * tanh(score / softcap)`.
    s_aux : Tensor, optional
        `[heads]`, a logit of each head that takes a share of the probability and has no value.

    Returns
    -------
    tuple
        The output, `[batch, queries, heads, value_dim]`, and `None` instead of weights.
    """
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    output = None
    if not dropout:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = lazy.attend(query, key, value, attention_mask, scale, softcap or 0.0, s_aux)
    if output is None:
        output = _dense(module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux)
    return output.transpose(1, 2).contiguous(), None


def _dense(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """The same from plain keys and values, all scores at once: prompts, and caches that encode nothing."""
    key, value = lazy.decoded(key), lazy.decoded(value)
    groups = query.shape[1] // key.shape[1]
    scores = query @ repeat_kv(key, groups).transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    tokens = scores.shape[-1]
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32)[..., :tokens].to(value.dtype)
    weights = torch.nn.functional.dropout(weights, p=dropout, training=module.training)
    output: Tensor = weights @ repeat_kv(value, groups)
    return output


def register() -> None:
    """Make the name known to transformers.

    Masks are additive, as eager attention has them: models that compute their scores by themselves add what they get.
    """
    AttentionInterface.register(NAME, memos_attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    modeling_gpt_neo.GPT_NEO_ATTENTION_CLASSES[NAME] = modeling_gpt_neo.GPTNeoSelfAttention  # has a list of its own
    scores.register()
