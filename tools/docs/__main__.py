"""`python -m tools.docs`: write man/ and completions/, and remove outdated files from them."""

from __future__ import annotations

from pathlib import Path

from tools.docs import generate

ROOT = Path(__file__).parents[2]

files = generate()
for folder in ("man", "completions"):
    (ROOT / folder).mkdir(exist_ok=True)
    for path in (ROOT / folder).iterdir():
        if f"{folder}/{path.name}" not in files:
            path.unlink()
for name, text in files.items():
    (ROOT / name).write_text(text)
print(f"Wrote {len(files)} files to man/ and completions/.")
