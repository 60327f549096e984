"""Outcome of a run."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.bench.load.record import RequestRecord
from toolkit.bench.report.stats import RunResult
from toolkit.bench.server_metrics import ServerChange
from toolkit.config.load import BenchConfig


@dataclass(frozen=True, slots=True)
class Outcome:
    """Settings, records and statistics of a run."""

    config: BenchConfig
    model: str
    result: RunResult
    records: Sequence[RequestRecord]
    interrupted: bool
    server: ServerChange | None
    server_version: str | None
    began: datetime.datetime

    @property
    def sound_per_second(self) -> float | None:
        """Seconds of sound that were transcribed in a second; None if prompts are no sound."""
        if not self.config.is_sound:
            return None
        return self.result.per_second(self.result.num_succeeded) * self.config.clip_seconds

    @property
    def exit_code(self) -> int:
        if self.interrupted:
            return 130
        return 1 if self.result.saturated is not None or self.result.num_succeeded == 0 else 0
