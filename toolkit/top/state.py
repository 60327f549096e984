"""What the screen shows of, apart from how: the servers, which of them is looked at, and their numbers."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.top.diagnosis import Diagnosis, diagnose, worst
from toolkit.top.readings.server import Server
from toolkit.top.readings.source import Source
from toolkit.top.view import View, charted, view_of

STALE = 3.0
"""Intervals without a reading, after which the numbers are called stale."""


class State:
    """The servers of a dashboard. `focus` is the one that is looked at, None for all together."""

    def __init__(self, sources: Sequence[Source], *, interval: float, window: float) -> None:
        self.sources = list(sources)
        self.servers = [Server(source.url, window) for source in sources]
        self.interval = interval
        self.focus: Server | None = self.servers[0] if len(self.servers) == 1 else None
        self.view = View()
        self.diagnosis = diagnose(self.servers[0])
        self.colors = True
        """Whether the terminal gets any."""
        self.is_paused = False
        self.is_recording = False
        self.num_ended = 0
        """Servers of which nothing more will come: those of a recording that is over."""

    @property
    def looked_at(self) -> list[Server]:
        """The one server, or all."""
        return self.servers if self.focus is None else [self.focus]

    def source_of(self, server: Server) -> Source:
        """Where a server's readings come from."""
        return self.sources[self.servers.index(server)]

    def refresh(self) -> None:
        """Computes the numbers anew."""
        self.view = charted(view_of(self.looked_at), self.looked_at)
        self.diagnosis = self._diagnose()

    def age(self, server: Server) -> float:
        """Seconds since its numbers were true."""
        return server.age(self.source_of(server).now())

    def is_stale(self, server: Server) -> bool:
        """Whether its numbers are no longer those of now."""
        return bool(server.error) or self.age(server) > STALE * max(1.0, self.interval)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come of any server."""
        return self.num_ended == len(self.servers)

    @property
    def all_stale(self) -> bool:
        """Whether nothing on the screen is of now."""
        looks = not self.has_ended and not self.is_paused
        return looks and all(self.is_stale(server) for server in self.looked_at)

    def _diagnose(self) -> Diagnosis:
        if self.focus is not None:
            return diagnose(self.focus, self.view)
        return worst(self.servers)
