"""Settings of every test."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is first imported, which transformers does. Nothing else here uses Triton without a GPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tiny models are faster on one thread, and two test processes then do not fight over the cores."""
    torch.set_num_threads(1)
