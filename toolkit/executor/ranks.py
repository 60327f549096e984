"""Interface to an engine's ranks, wherever they run."""

import abc
from pathlib import Path

from toolkit.executor.channel import SocketChannel


class Rank(abc.ABC):
    """A rank's process, and the channel to it."""

    rank: int
    channel: SocketChannel

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"rank {self.rank}"

    @abc.abstractmethod
    def how_ended(self) -> str:
        """Return how the process ended, as far as is known. Called when its channel has closed."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Kill the process. Idempotent."""

    @abc.abstractmethod
    def end(self, patience: float) -> None:
        """Wait `patience` seconds for the end, then kill. Close the channel."""


class Ranks(abc.ABC):
    """The ranks of one engine that have their own processes, all started.

    If rank 0 is not among them, it is the engine's process."""

    others: list[Rank]
    rendezvous: Path | str  # meeting point of the ranks: a new private folder, or tcp://HOST:PORT

    @abc.abstractmethod
    def close(self) -> None:
        """Free the ranks' resources, once they have ended."""
