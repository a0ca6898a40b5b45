"""How far one distribution over next tokens is from another, summed over positions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(kw_only=True)
class Agreement:
    """One cache beside DynamicCache, over the positions counted so far.

    Attributes
    ----------
    kl : float
        Sum of the Kullback-Leibler divergences of the cache's next-token distributions from DynamicCache's, in nats.
    agreed : int
        Positions whose likeliest next token is DynamicCache's.
    tokens : int
        Positions counted.
    """

    kl: float = 0.0
    agreed: int = 0
    tokens: int = 0

    @property
    def mean_kl(self) -> float:
        """Nats a token."""
        return self.kl / self.tokens

    @property
    def top1(self) -> float:
        """Share of positions whose likeliest next token is DynamicCache's."""
        return self.agreed / self.tokens

    def count(self, log_probs: Tensor, reference: Tensor) -> None:
        """Add positions: log-probabilities of the cache and of DynamicCache, both `[positions, vocabulary]`."""
        self.kl += float((reference.exp() * (reference - log_probs)).double().sum())
        self.agreed += int((log_probs.argmax(-1) == reference.argmax(-1)).sum())
        self.tokens += log_probs.shape[0]
