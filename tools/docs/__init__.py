"""Generate man pages, completions, pictures of terminals, other programs' flags: `make docs`."""

from __future__ import annotations

from tools.docs.completions import bash, fish, zsh
from tools.docs.llama_cpp import llama_cpp_page
from tools.docs.pages import pages
from tools.docs.terminal import terminal_pictures
from tools.docs.tree import program
from tools.docs.vllm import vllm_page

FOLDERS = (("man", "*"), ("completions", "*"), ("docs/images", "*.svg"), ("docs", "from-*.md"))
"""Folders, and the names of the files in them that are generated."""


def generate() -> dict[str, str]:
    """Return the text of each generated file, by its path in the repository."""
    tk = program()
    files = {f"man/{name}": text for name, text in pages(tk).items()}
    files |= {f"docs/images/{name}": text for name, text in terminal_pictures().items()}
    files["docs/from-vllm.md"] = vllm_page()
    files["docs/from-llama.cpp.md"] = llama_cpp_page()
    completions = {"tk.bash": bash(tk), "_tk": zsh(tk), "tk.fish": fish(tk)}
    return files | {f"completions/{name}": text for name, text in completions.items()}
