"""Pytest plugin that loads the CPU kernels from the library at SANITIZED_KERNELS."""

import ctypes
import os
from typing import Any

import pytest


class SanitizedCDLL(ctypes.CDLL):
    """Loader that takes the sanitized library in place of the kernels' own."""

    def __init__(self, name: Any, *args: Any, **kwargs: Any) -> None:
        if str(name).endswith("_kernels.so"):
            name = os.environ["SANITIZED_KERNELS"]
        super().__init__(name, *args, **kwargs)


# `library` always loads from its own folder, so this replaces the loader.
ctypes.CDLL = SanitizedCDLL  # type: ignore[misc]


def is_wanted(item: pytest.Item) -> bool:
    """True for cases of the compiled variant, with several threads where a test counts them.

    Draws by the thousand show probabilities: a few reach the same memory."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if item.path.stem == "overflow":
        return True
    return (
        parameters.get("variant") == os.environ["SANITIZED_VARIANT"]
        and 1 not in (parameters.get("num_threads"), parameters.get("threads"))
        and item.name.partition("[")[0] != "test_draws_follow_the_probabilities"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = [item for item in items if not is_wanted(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if is_wanted(item)]
