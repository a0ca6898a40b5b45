"""Settings of every test."""

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is first imported, which transformers does. Nothing else here uses Triton without a GPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tiny import LOSSLESS, LOSSY


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tiny models are faster on one thread, and two test processes then do not fight over the cores."""
    torch.set_num_threads(1)


@pytest.fixture(params=LOSSLESS)
def lossless(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of each kind of cache that gives what DynamicCache gives."""
    return LOSSLESS[request.param]


@pytest.fixture(params=LOSSY)
def lossy(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of each kind of cache that gives nearly that, and blocks short enough for tiny prompts."""
    return LOSSY[request.param]


@pytest.fixture(params=LOSSLESS | LOSSY)
def storage(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of every kind of cache."""
    return (LOSSLESS | LOSSY)[request.param]
