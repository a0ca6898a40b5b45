"""Attention over several parts of the cached tokens becomes attention over all of them."""

from __future__ import annotations

import torch
from torch import Tensor


class Merge:
    """Attention output over parts of the cached tokens, joined by their log-sum-exp.

    The softmax over all tokens weighs each part's output by the part's share of the sum of exponentials, as
    flash-decoding does with its splits (Dao, Haziza, Massa and Sizov, 2023,
    https://pytorch.org/blog/flash-decoding/). The parts come in any order, and only one beside the sum is ever held.
    """

    def __init__(self) -> None:
        self._output: Tensor | None = None
        self._log_sum_exp: Tensor | None = None

    def add(self, output: Tensor, log_sum_exp: Tensor) -> None:
        """Take in a part, as :func:`memos_hf.attention.op.partial_attention` gives it.

        Parameters
        ----------
        output : Tensor
            `[batch, heads, queries, value_dim]`. The first part's is kept and written to.
        log_sum_exp : Tensor
            `[batch, heads, queries]`, -inf where the part allows nothing.

        Raises
        ------
        ValueError
            If the shapes are not those of the parts before, or do not fit each other.
        """
        before = output.shape if self._output is None else self._output.shape
        if output.shape != before or log_sum_exp.shape != before[:-1]:
            expected = f"an output {tuple(before)} and its log-sum-exp {tuple(before[:-1])}"
            raise ValueError(f"part: expected {expected}, got {tuple(output.shape)} and {tuple(log_sum_exp.shape)}")
        if self._output is None or self._log_sum_exp is None:
            self._output, self._log_sum_exp = output, log_sum_exp
            return
        joined = torch.logaddexp(self._log_sum_exp, log_sum_exp)
        share = (log_sum_exp - _finite(joined)).exp_()
        self._output.lerp_(output, share.unsqueeze(-1))
        self._log_sum_exp = joined

    def result(self, head_sinks: Tensor | None = None) -> Tensor:
        """Attention over all parts so far.

        Parameters
        ----------
        head_sinks : Tensor, optional
            `[heads]`, a logit of each head that takes a share of the probability and has no value (gpt-oss).

        Returns
        -------
        Tensor
            `[batch, heads, queries, value_dim]` in the dtype of the parts; 0 where none allows anything. A part that is
            added later may change it.

        Raises
        ------
        RuntimeError
            If there was no part.
        """
        if self._output is None or self._log_sum_exp is None:
            raise RuntimeError("merge: expected at least one part, got none")
        if head_sinks is None:
            return self._output
        share = (_finite(self._log_sum_exp) - head_sinks.to(self._output.dtype).view(-1, 1)).sigmoid_()
        return self._output * share.unsqueeze(-1)


def _finite(log_sum_exp: Tensor) -> Tensor:
    """The lowest number for -inf, which may be subtracted from itself."""
    return log_sum_exp.clamp(min=torch.finfo(log_sum_exp.dtype).min)
