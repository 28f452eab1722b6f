"""What every test shares: one thread, no network for data sets, and the same Hypothesis examples in every run."""

import os

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
torch.set_num_threads(1)

settings.register_profile("gradveil", deadline=None, derandomize=True)
settings.load_profile("gradveil")


@pytest.fixture
def generator() -> torch.Generator:
    """A fresh generator with a fixed seed."""
    return torch.Generator().manual_seed(0)
