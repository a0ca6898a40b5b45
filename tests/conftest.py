"""Settings of every test."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tiny models are faster on one thread, and two test processes then do not fight over the cores."""
    torch.set_num_threads(1)
