"""What `make test-gpu` chooses of this folder's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest_plugins = "pytester"

TESTS = """
    import pytest

    @pytest.fixture
    def made_there(device):
        return device

    def test_directly(device):
        pass

    def test_through_another(made_there):
        pass

    def test_elsewhere():
        pass
"""


@pytest.mark.parametrize("has_gpu", [True, False])
def test_what_takes_the_device_is_a_test_of_the_gpu_where_there_is_one(
    pytester, monkeypatch, has_gpu
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers = gpu")
    pytester.makepyfile(TESTS)
    chosen, everything = (
        [
            report.nodeid.partition("::")[2]
            for report in pytester.inline_run("-p", "no:asyncio", *more).listoutcomes()[0]
        ]
        for more in (["-m", "gpu"], [])
    )
    assert chosen == (["test_directly", "test_through_another"] if has_gpu else [])
    assert everything == ["test_directly", "test_through_another", "test_elsewhere"]
