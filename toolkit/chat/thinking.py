"""Reasoning that a server leaves in the answer, between the tags that the model writes."""

from __future__ import annotations

from dataclasses import replace

from toolkit.chat.delta import Delta

BEGIN, END = "<think>", "</think>"


class ThinkTags:
    """Tells reasoning at the beginning of an answer from what is said. Tags may come in pieces."""

    def __init__(self) -> None:
        self._held = ""  # what may be a tag, or the beginning of one
        self._tag: str | None = BEGIN  # which is looked for

    def split(self, delta: Delta) -> Delta:
        """The piece, with what was thought as its reasoning."""
        if self._tag is None or not delta.content:
            return delta
        self._held += delta.content
        if self._tag == BEGIN:
            begun = self._held.lstrip()
            if len(begun) < len(BEGIN) and BEGIN.startswith(begun):
                return replace(delta, content="")
            if not begun.startswith(BEGIN):
                self._tag = None
                return replace(delta, content=self._taken(len(self._held)))
            self._tag, self._held = END, begun.removeprefix(BEGIN)
        thought, is_over, said = self._held.partition(END)
        if is_over:
            self._tag = None
            return replace(delta, reasoning=delta.reasoning + thought, content=said.lstrip())
        return replace(delta, reasoning=delta.reasoning + self._taken(self._sure()), content="")

    def rest(self) -> Delta:
        """What was held back, when nothing more comes."""
        tag, text = self._tag, self._taken(len(self._held))
        return Delta(reasoning=text) if tag == END else Delta(content=text) if tag else Delta()

    def _taken(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _sure(self) -> int:
        """How many characters cannot belong to the tag that ends the reasoning."""
        sizes = range(len(END) - 1, 0, -1)
        return len(self._held) - next(
            (size for size in sizes if self._held.endswith(END[:size])), 0
        )
