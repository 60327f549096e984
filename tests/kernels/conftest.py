"""Where the kernels' tests run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def triton_attention(triton_runs: bool) -> ModuleType:
    if not triton_runs:
        pytest.skip(
            "Triton was imported without its interpreter: these tests run in a process of their own"
        )
    from toolkit.kernels.triton import attention

    return attention


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is a GPU, what runs on `device` is a test of it, and `-m gpu` chooses that, too: marked before it chooses."""
    if torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(HERE) and "device" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.gpu)
