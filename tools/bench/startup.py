"""How long `tk serve` takes from the command to its first answer: `python -m tools.bench.startup FOLDER [tk serve's flags]`.

Each start is a row of JSON: seconds until /readyz says 200 (`ready_s`), what each phase of it took as the server tells (`phases`; what is
not in them is imports, above all), and the first completion's milliseconds, of 4 tokens in and 16 out (`first_answer_ms`). Compiled kernels
are kept in a folder that is empty at first: on a GPU the first start compiles them, and the next ones find them there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.bench.server_process import serving

PHASE = re.compile(r"^  (\S.*?) +(\d+\.\d\d) s$", re.MULTILINE)
"""Of the server's log."""
ASKED = {"prompt": [1, 2, 3, 4], "max_tokens": 16, "temperature": 0, "ignore_eos": True}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="FOLDER", help="a model that generates")
    parser.add_argument("--starts", type=int, default=3, help="one after the other [3]")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(args.starts):
            row = start([args.folder, *flags], Path(scratch, "kernels"), Path(scratch, "log"))
            print(json.dumps(row), flush=True)


def start(arguments: list[str], kernels: Path, log: Path) -> dict[str, Any]:
    """One row. Raises SystemExit with what the server said when it ends instead."""
    try:
        with (
            log.open("wb") as written,
            serving(arguments, {"TRITON_CACHE_DIR": str(kernels)}, written) as server,
        ):
            asked = time.monotonic()
            answer = server.client.post("/v1/completions", json=ASKED).raise_for_status().json()
            answered = time.monotonic() - asked
            assert answer["usage"]["completion_tokens"] == ASKED["max_tokens"]
    except SystemExit as ended:
        sys.stderr.write(log.read_text(errors="replace"))
        raise SystemExit(ended.code) from None
    phases = {
        name: float(seconds) for name, seconds in PHASE.findall(log.read_text(errors="replace"))
    }
    return {
        "ready_s": round(server.ready, 2),
        "phases": phases,
        "first_answer_ms": round(1000 * answered, 1),
    }


if __name__ == "__main__":
    main()
