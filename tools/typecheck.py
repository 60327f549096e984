"""Check the types of `toolkit`, `tools` and `kernels`: `python -m tools.typecheck`.

`kernels/` is installed as `toolkit.kernels`, which mypy does not find. So mypy runs in a folder of
links with that layout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINKS = ROOT / "build" / "typecheck"


def main() -> int:
    """Run mypy with the project's settings. Returns its exit code."""
    shutil.rmtree(LINKS, ignore_errors=True)
    (LINKS / "toolkit").mkdir(parents=True)
    for path in (ROOT / "toolkit").iterdir():
        if path.name != "kernels":
            (LINKS / "toolkit" / path.name).symlink_to(path)
    (LINKS / "toolkit" / "kernels").symlink_to(ROOT / "kernels")
    (LINKS / "tools").symlink_to(ROOT / "tools")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), "--num-workers", "2"]
    command += ["-p", "toolkit", "-p", "tools"]
    result = subprocess.run(command, cwd=LINKS, text=True, stdout=subprocess.PIPE, check=False)
    print(result.stdout.replace("toolkit/kernels/", "kernels/"), end="")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
