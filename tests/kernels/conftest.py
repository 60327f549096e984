"""Without a GPU, Triton kernels run in Triton's interpreter, to be asked for before Triton is imported."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest
import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def triton_runs() -> bool:
    """False where Triton was imported for a GPU that is not there; a process of its own is needed then."""
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    return torch.cuda.is_available() or not isinstance(tl.sum, JITFunction)


@pytest.fixture(scope="session")
def triton_attention(triton_runs: bool) -> ModuleType:
    if not triton_runs:
        pytest.skip("Triton was imported without its interpreter: these tests run in a process of their own")
    from toolkit.kernels.triton import attention

    return attention
