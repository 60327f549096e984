"""Where the kernels' tests run."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def triton_attention(triton_runs: bool) -> ModuleType:
    if not triton_runs:
        pytest.skip("Triton was imported without its interpreter: these tests run in a process of their own")
    from toolkit.kernels.triton import attention

    return attention
