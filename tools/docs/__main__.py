"""`python -m tools.docs`: write man/, completions/ and pictures, and remove outdated files."""

from __future__ import annotations

from pathlib import Path

from tools.docs import generate

ROOT = Path(__file__).parents[2]

files = generate()
for folder, kind in (("man", "*"), ("completions", "*"), ("docs/images", "*.svg")):
    (ROOT / folder).mkdir(exist_ok=True)
    for path in (ROOT / folder).glob(kind):
        if f"{folder}/{path.name}" not in files:
            path.unlink()
for name, text in files.items():
    (ROOT / name).write_text(text)
print(f"Wrote {len(files)} files to man/, completions/ and docs/images/.")
