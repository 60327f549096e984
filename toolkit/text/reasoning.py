"""Formats of reasoning before the content of an answer: `<think>...</think>`, then the content."""

from collections.abc import Callable
from typing import ClassVar, Literal

from toolkit.sampling.params import THINK_END, THINK_START
from toolkit.text.tool_formats import partial_marker_size

Reasoning = Literal["begun", "possible"]
"""begun: the prompt opens the reasoning. possible: the answer may open it with the marker."""


class ReasoningFormat:
    """Splits one answer, as it arrives, into reasoning and the rest, without space at the markers.

    The output does not depend on how the text is split. A subclass may have other markers."""

    start: ClassVar[str] = THINK_START
    end: ClassVar[str] = THINK_END

    def __init__(self, reasoning: Reasoning | None) -> None:
        """`reasoning`: how the answer begins; None: without reasoning."""
        steps = {None: self._pass, "possible": self._maybe_open, "begun": self._open}
        self._step: Callable[[str, bool], tuple[str, str]] = steps[reasoning]
        self._held_back = ""

    @classmethod
    def reasoning_after(cls, prompt: str) -> Reasoning | None:
        """Return how the answer begins. `prompt`: the prompt's last tokens, without final space."""
        if prompt.endswith(cls.end):
            return None
        return "begun" if prompt.endswith(cls.start) else "possible"

    def add(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Return (reasoning, rest) known so far. Text that may begin a marker is held back."""
        held_back, self._held_back = self._held_back, ""
        return self._step(held_back + text, is_last)

    def _maybe_open(self, text: str, is_last: bool) -> tuple[str, str]:
        begin = text.lstrip()
        if not is_last and len(begin) < len(self.start) and self.start.startswith(begin):
            self._held_back = text
            return "", ""
        self._step = self._open if begin.startswith(self.start) else self._pass
        return self._step(text, is_last)

    def _open(self, text: str, is_last: bool) -> tuple[str, str]:
        """Skip the marker: some models repeat the one that the prompt ends with."""
        begin = text.lstrip()
        if not is_last and len(begin) < len(self.start) and self.start.startswith(begin):
            self._held_back = text
            return "", ""
        self._step = self._trim
        return self._trim(begin.removeprefix(self.start), is_last)

    def _trim(self, text: str, is_last: bool) -> tuple[str, str]:
        begin = text.lstrip()
        if not begin:
            return "", ""
        self._step = self._reason
        return self._reason(begin, is_last)

    def _reason(self, text: str, is_last: bool) -> tuple[str, str]:
        reasoning, marker, rest = text.partition(self.end)
        if marker:
            self._step = self._close
            return reasoning.rstrip(), self._close(rest, is_last)[1]
        certain = text
        if not is_last:
            certain = text[: len(text) - partial_marker_size(text, self.end)].rstrip()
        self._held_back = text[len(certain) :]
        return certain, ""

    def _close(self, text: str, is_last: bool) -> tuple[str, str]:
        rest = text.lstrip()
        if rest:
            self._step = self._pass
        return "", rest

    def _pass(self, text: str, is_last: bool) -> tuple[str, str]:
        return "", text


class DeepSeekR1Format(ReasoningFormat):
    """Reasoning that every answer begins with, with or without `<think>`."""

    @classmethod
    def reasoning_after(cls, prompt: str) -> Reasoning | None:
        return None if prompt.endswith(cls.end) else "begun"
