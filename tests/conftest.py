"""What every test shares: one thread, no network, no folder of data sets, the same Hypothesis examples every time."""

import os
import tracemalloc
from collections.abc import Generator

import pytest
import torch
from hypothesis import settings

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}.items():
    os.environ.setdefault(name, value)
os.environ.pop("GRADVEIL_DATA", None)  # tests use bundled data, whatever a developer has
torch.set_num_threads(1)

settings.register_profile("gradveil", deadline=None, derandomize=True)
settings.load_profile("gradveil")


TRACED = tracemalloc.is_tracing()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Refuse a test that leaves memory traced: all tests after it would take several times as long."""
    yield
    if tracemalloc.is_tracing() and not TRACED:
        tracemalloc.stop()
        pytest.fail("the test left the tracing of memory on")


@pytest.fixture
def generator() -> torch.Generator:
    """A fresh generator with a fixed seed."""
    return torch.Generator().manual_seed(0)
