"""Ranks on this machine: the engine's process is rank 0, the others are its children."""

import shutil
import socket
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

from toolkit.config import EngineConfig
from toolkit.executor.channel import SocketChannel
from toolkit.executor.rank_messages import StartRank
from toolkit.executor.ranks import Rank, Ranks
from toolkit.logs import LogStyle


class Processes(Ranks):
    def __init__(
        self, config: EngineConfig, folder: Path, log: LogStyle, parent: Path | None = None
    ) -> None:
        """`parent`: folder for the ranks' own folder. Default: the system's temporary folder."""
        self.rendezvous = rendezvous = Path(tempfile.mkdtemp(prefix="tk-ranks-", dir=parent))
        weakref.finalize(self, shutil.rmtree, rendezvous, ignore_errors=True)
        self.others = [
            RankChild(StartRank(config, str(folder), str(rendezvous), rank, log))
            for rank in range(1, config.parallel.world_size)
        ]

    def close(self) -> None:
        shutil.rmtree(self.rendezvous, ignore_errors=True)


class RankChild(Rank):
    """A child process at the other end of a socket pair."""

    def __init__(self, begin: StartRank) -> None:
        self.rank = begin.rank
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "toolkit.executor.rank", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.channel = SocketChannel(ours)
        self.channel.send(begin)

    def how_ended(self) -> str:
        code = self._process.wait()
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()

    def end(self, patience: float) -> None:
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.channel.close()
