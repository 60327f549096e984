"""The result of a check."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    name: str
    status: Status
    text: str
    fix: str = ""  # what to do, unless it passed

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
