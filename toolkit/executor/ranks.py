"""How an engine's ranks are started and reached, wherever they run."""

from __future__ import annotations

import abc
from pathlib import Path

from toolkit.executor.channel import Channel


class Rank(abc.ABC):
    """A rank's process, and the way to it."""

    rank: int
    channel: Channel

    @property
    def name(self) -> str:
        """As a message speaks of it."""
        return f"rank {self.rank}"

    @abc.abstractmethod
    def how_ended(self) -> str:
        """Of a process whose channel has ended: in what way, as far as is known."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Ends it by force. More than once is the same as once."""

    @abc.abstractmethod
    def end(self, patience: float) -> None:
        """Waits for its end for so many seconds, then forces it, and closes the channel."""


class Ranks(abc.ABC):
    """The ranks of one engine that have processes of their own, each of which has been told to begin. When the first is not
    among them, it is the engine's process."""

    others: list[Rank]
    meeting: Path | str
    """Where the ranks find each other: a new folder that is nobody else's, or tcp://HOST:PORT."""

    @abc.abstractmethod
    def close(self) -> None:
        """Lets go of what they were given, once they have ended."""
