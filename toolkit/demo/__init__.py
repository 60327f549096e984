"""The small model that ships with tk, and the recipe that makes it.

`facts` reads `facts.txt` and `talk.txt`; `corpus` turns them into conversations, with the wording of `frames` and `words` and with what
`invent` and `elsewhere` make up; `train` makes the model of them, and `evaluate` asks it questions that it was not
trained on.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["MODEL_DIR"]

MODEL_DIR: Path = Path(__file__).parent / "model"
"""The folder of the shipped model, in the Hugging Face format."""
