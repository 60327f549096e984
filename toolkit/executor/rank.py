"""A rank other than the first, in a process of its own: `python -m toolkit.executor.rank DESCRIPTOR`, started by
`MultiprocExecutor` with one end of a socket.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections import deque
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.executor.channel import Channel
from toolkit.executor.messages import (
    Answer,
    Begin,
    Broken,
    Call,
    Constrain,
    Here,
    Running,
    Step,
    ToRank,
    decode_to_rank,
)
from toolkit.parent import end_with_parent


class RankProcess:
    """Applies what the first rank's process sends, in order. Nothing is answered but calls: every rank knows as much."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._rank = 0

    def run(self) -> None:
        """Until the other end says so, or is gone. What ends it otherwise is told there, and nowhere else."""
        try:
            self._serve()
        except ToolkitError as error:
            self._channel.send(Broken(self._rank, type(error).__name__, error.message))
        except EOFError:
            pass  # whoever started this is gone
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            self._channel.send(Broken(self._rank, "", told, traceback.format_exc()))

    def _receive(self) -> ToRank:
        return decode_to_rank(self._channel.receive())

    def _serve(self) -> None:
        begin = self._receive()
        assert isinstance(begin, Begin)
        self._rank = begin.rank
        begin.log.apply()

        from toolkit.executor.progress import Progress
        from toolkit.worker.model_runner import PendingOutput
        from toolkit.worker.worker import Worker

        self._channel.send(Here(begin.rank))
        meeting = Path(begin.meeting)
        worker = Worker(begin.config, Path(begin.folder), begin.rank, meeting)
        worker.start(lambda name, seconds: None)
        progress = Progress(meeting, begin.config.parallel.tensor_parallel_size)
        self._channel.send(Running(begin.rank))
        unsampled: deque[tuple[int, PendingOutput]] = deque()
        while True:
            message = self._receive()
            if isinstance(message, Step):
                pending = worker.execute(message.output)
                if len(message.output.constrained):
                    unsampled.append((message.output.step, pending))
                progress.count(begin.rank)
            elif isinstance(message, Constrain):
                while unsampled[0][0] != message.step:
                    unsampled.popleft()
                unsampled.popleft()[1].constrain(message.masks)
            elif isinstance(message, Call):
                value = getattr(worker, message.method)(*message.arguments)
                self._channel.send(Answer(begin.rank, value))
            else:
                return


def main() -> None:
    # Who asks a server to end asks its first process; this one ends with that.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    RankProcess(Channel(socket.socket(fileno=int(sys.argv[1])))).run()
    os._exit(0)  # what is left of the group of ranks may wait for others that are gone


if __name__ == "__main__":
    main()
