"""A process that renders chat templates of requests, with limits on its memory and CPU time.

A message is JSON, by Python's own module, which keeps numbers of any size and lone surrogates: to
the process a template, the special tokens by name and the options of `render_template`; from it the
text, or the problem of the template. The parent limits the time and kills the process; the limit of
CPU time only matters if the parent is gone."""

import contextlib
import json
import os
import resource
import socket
import sys
import time

from toolkit.framing import HEADER, frame
from toolkit.hardware.parent import exit_with_parent
from toolkit.text.chat_template import describe, render_template

READY = frame(b"")


def main(max_bytes: int, max_seconds: float) -> None:
    """Serve the socket that is the standard output. Arguments: limits of memory and of a turn."""
    channel = socket.socket(fileno=os.dup(1))
    exit_with_parent()
    _limit(resource.RLIMIT_AS, max_bytes)
    render_template("", {}, [{}])  # imports Jinja
    channel.sendall(READY)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):  # a template has no place in the log
        os.dup2(nothing, output)
    messages = channel.makefile("rb")
    try:
        while header := messages.read(HEADER.size):
            job = messages.read(*HEADER.unpack(header))
            _limit(resource.RLIMIT_CPU, int(time.process_time() + max_seconds) + 2)
            channel.sendall(frame(_render(job)))
    except MemoryError:
        os._exit(1)


def _limit(kind: int, value: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # macOS does not limit memory
        resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def _render(job: bytes) -> bytes:
    template, special_tokens, options = json.loads(job)
    try:
        answer = {"text": render_template(template, special_tokens, **options)}
    except MemoryError:
        raise
    except Exception as error:  # expressions raise any type
        answer = {"problem": describe(error)}
    # Escapes would take twelve bytes for a character of four.
    return json.dumps(answer, ensure_ascii=False).encode(errors="surrogatepass")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
