"""What a layer hands over to be saved and takes back; what is inside, only the layer knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerState:
    """All that a layer holds, in a form that goes into a file.

    Attributes
    ----------
    kind : str
        Name of the layer's class.
    tensors : dict[str, Tensor]
        What is valid, as it is stored: views that hold until the layer's next call, or copies. To check whether a
        layer can take them, their shapes and dtypes are enough, so that they may be on the meta device.
    numbers : dict[str, Any]
        Lengths, flags and tables, of types that JSON has.
    tokens : int, optional
        Tokens seen; `None` where the layer does not count them. Only says what is there.
    """

    kind: str
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]
    tokens: int | None = None

    def pair(self) -> tuple[Tensor, Tensor]:
        """Keys and values, `[batch, heads, tokens, head_dim]` each."""
        return self.tensor("keys"), self.tensor("values")

    def tensor(self, name: str) -> Tensor:
        """The tensor called `name`; a `ValueError` if there is none."""
        if name not in self.tensors:
            raise ValueError(f"tensors: expected one called {name!r}, got {sorted(self.tensors)}")
        return self.tensors[name]

    def count(self, name: str) -> int:
        """The number called `name`, which is an int of at least 0; a `ValueError` if it is not."""
        value = self.numbers.get(name)
        if type(value) is not int or value < 0:
            raise ValueError(f"{name}: expected an int of at least 0, got {value!r}")
        return value

    def flag(self, name: str) -> bool:
        """The flag called `name`; a `ValueError` if it is not True or False."""
        value = self.numbers.get(name)
        if not isinstance(value, bool):
            raise ValueError(f"{name}: expected true or false, got {value!r}")
        return value

    def check_tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Raise a `ValueError` if the tensor called `name` is not of this shape and dtype."""
        tensor = self.tensor(name)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"{name}: expected {shape} {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")


def placeholder(like: Tensor, device: torch.device) -> Tensor:
    """A tensor of the shape and dtype of `like` on `device` that takes no memory: what layers allocate by."""
    return torch.empty((), dtype=like.dtype, device=device).expand(like.shape)
