"""`python -m tools.docs`: writes man/ and completions/ of this checkout, and removes what is no longer made."""

from __future__ import annotations

from pathlib import Path

from tools.docs import everything

ROOT = Path(__file__).parents[2]

made = everything()
for folder in ("man", "completions"):
    (ROOT / folder).mkdir(exist_ok=True)
    for path in (ROOT / folder).iterdir():
        if f"{folder}/{path.name}" not in made:
            path.unlink()
for name, text in made.items():
    (ROOT / name).write_text(text)
print(f"Wrote {len(made)} files into man/ and completions/.")
