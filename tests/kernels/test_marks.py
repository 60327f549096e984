"""`make test-gpu` selects this folder's tests that use a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest_plugins = "pytester"

TESTS = """
    import pytest

    @pytest.fixture
    def on_device(device):
        return device

    def test_directly(device):
        pass

    def test_indirectly(on_device):
        pass

    def test_without_device():
        pass
"""


@pytest.mark.parametrize("has_gpu", [True, False])
def test_tests_that_use_the_device_are_gpu_tests(pytester, monkeypatch, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers = gpu")
    pytester.makepyfile(TESTS)
    selected, everything = (
        [
            report.nodeid.partition("::")[2]
            for report in pytester.inline_run("-p", "no:asyncio", *more).listoutcomes()[0]
        ]
        for more in (["-m", "gpu"], [])
    )
    assert selected == (["test_directly", "test_indirectly"] if has_gpu else [])
    assert everything == ["test_directly", "test_indirectly", "test_without_device"]
