"""`python -m tools.docs`: write the generated files, and remove outdated ones."""

from __future__ import annotations

from pathlib import Path

from tools.docs import FOLDERS, generate

ROOT = Path(__file__).parents[2]

files = generate()
for folder, kind in FOLDERS:
    (ROOT / folder).mkdir(exist_ok=True)
    for path in (ROOT / folder).glob(kind):
        if f"{folder}/{path.name}" not in files:
            path.unlink()
for name, text in files.items():
    (ROOT / name).write_text(text)
print(f"Wrote {len(files)} files to man/, completions/ and docs/.")
