"""Fixtures of tests of drafters."""

import pytest

from toolkit.scheduler.speculation import StepCosts


@pytest.fixture(autouse=True)
def all_drafts_pay(monkeypatch: pytest.MonkeyPatch):
    """Verify all drafts: what steps of a tiny model take would decide otherwise."""
    monkeypatch.setattr(StepCosts, "useful", lambda self, num_drafts, *others: num_drafts)
