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
    _refuse_ranges_that_do_not_compile()


def _refuse_ranges_that_do_not_compile() -> None:
    """Let Triton's interpreter refuse ranges that its compiler refuses."""
    from triton.runtime.interpreter import InterpreterBuilder

    make = InterpreterBuilder.create_make_range

    def checked(self: object, ret_ty: object, start: int, stop: int) -> object:
        if (stop - start).bit_count() != 1:
            raise ValueError(f"arange({start}, {stop}): its length must be a power of two")
        return make(self, ret_ty, start, stop)

    InterpreterBuilder.create_make_range = checked


@pytest.fixture(scope="session")
def triton_attention(triton: None) -> ModuleType:
    from toolkit.kernels.triton import attention

    return attention


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """If there is a GPU, mark tests that use `device`, before `-m gpu` selects tests."""
    if torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(HERE) and "device" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.gpu)
