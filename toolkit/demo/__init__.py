"""The small demo model that ships with tk. `tools.demo` trains it."""

from pathlib import Path

__all__ = ["MODEL_DIR"]

MODEL_DIR: Path = Path(__file__).parent / "model"
"""Folder of the demo model, in the Hugging Face format."""
