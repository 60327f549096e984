"""Fixtures of tests of drafters."""

import pytest

from tests.worker.gpu_runners import gpu_runner, rerun_graphs, two_stages
from toolkit.scheduler.speculation import StepCosts

__all__ = ["gpu_runner", "rerun_graphs", "two_stages"]


@pytest.fixture(autouse=True)
def all_drafts_pay(monkeypatch: pytest.MonkeyPatch):
    """Verify all drafts: what steps of a tiny model take would decide otherwise."""
    monkeypatch.setattr(StepCosts, "useful", lambda self, num_drafts, *others: num_drafts)

    def pays(self: StepCosts, most, rates) -> bool:
        return bool(self.useful(most, rates, len(most)).any())

    monkeypatch.setattr(StepCosts, "pays_to_draft", pays)
