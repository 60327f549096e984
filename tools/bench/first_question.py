"""Time what a user waits for at the terminal: `python -m tools.bench.first_question MODEL`.

Each repetition prints a row of JSON, in seconds: `first_line`, from `tk serve` to its first line on
a terminal; `not_kept`, a question with `tk chat --keep-alive 0`, which starts a server and ends it;
`first`, a question that starts a server and leaves it; `second`, one that finds it; `load`, the
load of the machine's cores at the end (1 minute)."""

from __future__ import annotations

import argparse
import json
import os
import pty
import subprocess
import sys
import tempfile
import time

TK = (sys.executable, "-m", "toolkit")
QUESTION = "What is TTFT?"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="folder, GGUF file or name of a chat model")
    parser.add_argument("--repetitions", type=int, default=3, help="number of rows [3]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"XDG_RUNTIME_DIR": folder, "XDG_STATE_HOME": folder}
        for _ in range(args.repetitions):
            print(json.dumps(measure(args.model, environment)), flush=True)


def measure(model: str, environment: dict[str, str]) -> dict[str, float]:
    """Return a row."""
    row = {
        "first_line": first_line(model, environment),
        "not_kept": ask(model, environment, "--keep-alive", "0"),
        "first": ask(model, environment),
        "second": ask(model, environment),
        "load": os.getloadavg()[0],
    }
    subprocess.run([*TK, "stop", "--all"], env=environment, check=True, capture_output=True)
    return {name: round(value, 2) for name, value in row.items()}


def ask(model: str, environment: dict[str, str], *flags: str) -> float:
    """Return the seconds of a question. Raises CalledProcessError if it fails."""
    start = time.monotonic()
    subprocess.run(
        [*TK, "chat", model, QUESTION, *flags],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )
    return time.monotonic() - start


def first_line(model: str, environment: dict[str, str]) -> float:
    """Return the seconds until `tk serve` has written a line to a terminal."""
    ours, theirs = pty.openpty()
    start = time.monotonic()
    server = subprocess.Popen(
        [*TK, "serve", model, "--port", "0"],
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    try:
        text = b""
        while b"\n" not in text:
            text += os.read(ours, 1024)
        return time.monotonic() - start
    finally:
        server.kill()
        server.wait()
        os.close(ours)
        os.close(theirs)


if __name__ == "__main__":
    main()
