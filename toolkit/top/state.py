"""State of the dashboard: the servers, the one in focus, and their numbers."""

from collections.abc import Sequence

from toolkit.top.diagnosis import Diagnosis, diagnose, worst
from toolkit.top.readings.server import Server
from toolkit.top.readings.source import Source
from toolkit.top.view import View, view_of, with_charts

STALE = 3.0  # intervals without a reading after which numbers are stale


class State:
    """The servers of a dashboard. `focus` is the one shown, None for all together."""

    def __init__(self, sources: Sequence[Source], *, interval: float, window: float) -> None:
        self.sources = list(sources)
        self.servers = [Server(source.url, window) for source in sources]
        self.interval = interval
        self.focus: Server | None = self.servers[0] if len(self.servers) == 1 else None
        self.view = View()
        self.diagnosis = diagnose(self.servers[0])
        self.has_colors = True
        self.is_paused = False
        self.is_recording = False
        self.num_ended = 0  # servers of a replayed recording that are at its end

    @property
    def shown_servers(self) -> list[Server]:
        """The server in focus, or all."""
        return self.servers if self.focus is None else [self.focus]

    def source_of(self, server: Server) -> Source:
        """Return the source of a server's readings."""
        return self.sources[self.servers.index(server)]

    def refresh(self) -> None:
        """Compute the numbers from the newest readings."""
        self.view = with_charts(view_of(self.shown_servers), self.shown_servers)
        self.diagnosis = self._diagnose()

    def age(self, server: Server) -> float:
        """Return the seconds since a server's last successful reading."""
        return server.age(self.source_of(server).now())

    def is_stale(self, server: Server) -> bool:
        """Return True if a server's numbers are not current."""
        return bool(server.error) or self.age(server) > STALE * max(1.0, self.interval)

    @property
    def has_ended(self) -> bool:
        """True at the end of a replayed recording."""
        return self.num_ended == len(self.servers)

    @property
    def all_stale(self) -> bool:
        """True if no number on the screen is current."""
        is_reading = not self.has_ended and not self.is_paused
        return is_reading and all(self.is_stale(server) for server in self.shown_servers)

    def _diagnose(self) -> Diagnosis:
        if self.focus is not None:
            return diagnose(self.focus, self.view)
        return worst(self.servers)
