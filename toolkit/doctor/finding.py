"""What a check found out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`fix` says what to do, when something is to be done."""

    name: str
    status: Status
    text: str
    fix: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
