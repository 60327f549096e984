"""Time `tk serve` until its first answer: `python -m tools.bench.startup FOLDER [FLAGS]`.

FLAGS are those of `tk serve`. Each start prints a row of JSON: `ready_s`, the seconds until /readyz
returns 200; `phases`, the seconds of each phase from the server's log (the rest is mostly imports);
`first_answer_ms`, the milliseconds of the first completion with 4 tokens in and 16 out. The cache
of compiled kernels is empty at first: on a GPU the first start compiles them and later ones reuse
them."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.bench.server_process import run_server

PHASE = re.compile(r"^  (\S.*?) +(\d+\.\d\d) s$", re.MULTILINE)
"""A phase in the server's log."""
REQUEST = {"prompt": [1, 2, 3, 4], "max_tokens": 16, "temperature": 0, "ignore_eos": True}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="FOLDER", help="folder of a generative model")
    parser.add_argument("--starts", type=int, default=3, help="number of starts [3]")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(args.starts):
            row = start([args.folder, *flags], Path(scratch, "kernels"), Path(scratch, "log"))
            print(json.dumps(row), flush=True)


def start(arguments: list[str], kernels: Path, log: Path) -> dict[str, Any]:
    """Start once and return the row. If the server fails, prints its log and raises SystemExit."""
    environment = {"TRITON_CACHE_DIR": str(kernels), "TK_LOG_FORMAT": "text"}
    try:
        with (
            log.open("wb") as log_file,
            run_server(arguments, environment, log_file) as server,
        ):
            begin = time.monotonic()
            answer = server.client.post("/v1/completions", json=REQUEST).raise_for_status().json()
            seconds = time.monotonic() - begin
            assert answer["usage"]["completion_tokens"] == REQUEST["max_tokens"]
    except SystemExit as error:
        sys.stderr.write(log.read_text(errors="replace"))
        raise SystemExit(error.code) from None
    phases = {name: float(s) for name, s in PHASE.findall(log.read_text(errors="replace"))}
    return {
        "ready_s": round(server.ready, 2),
        "phases": phases,
        "first_answer_ms": round(1000 * seconds, 1),
    }


if __name__ == "__main__":
    main()
