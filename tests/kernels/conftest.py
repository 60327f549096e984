"""Fixtures of the kernels' tests, and the mark of those that use a GPU."""

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
def triton(triton_runs: bool) -> None:
    """Skip the test if Triton cannot run in this process."""
    if not triton_runs:
        pytest.skip(
            "Triton was imported without its interpreter: these tests run in another process"
        )


@pytest.fixture(scope="session")
def triton_attention(triton: None) -> ModuleType:
    from toolkit.kernels.triton.attention import attention

    return attention


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """If there is a GPU, mark tests that use `device`, before `-m gpu` selects tests."""
    if torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(HERE) and "device" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.gpu)
