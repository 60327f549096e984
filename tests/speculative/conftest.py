"""Fixtures of tests of drafters."""

import pytest

from toolkit.worker.warm_up import WarmUp


@pytest.fixture(autouse=True)
def all_drafts_pay(monkeypatch: pytest.MonkeyPatch):
    """Verify all drafts: what steps of a tiny model take would decide otherwise."""
    monkeypatch.setattr(WarmUp, "step_seconds", lambda self: [])
