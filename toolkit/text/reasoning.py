"""Answers with reasoning first: `<think>...</think>`, then the content."""

from collections.abc import Callable
from typing import Literal

from toolkit.sampling.params import THINK_END, THINK_START
from toolkit.text.tokenizer import Tokenizer
from toolkit.text.tool_formats import partial_marker_size

_LAST = 8  # tokens at the prompt's end to search for a marker

Reasoning = Literal["begun", "possible"]
"""begun: the prompt opens the reasoning. possible: the answer may open it with `<think>`."""


def reasoning_after(
    prompt: list[int], tokenizer: Tokenizer, parser: str | None
) -> Reasoning | None:
    """Return how the answer begins, judged by the prompt's end; None: without reasoning."""
    if parser is None:
        return None
    end = tokenizer.decode(prompt[-_LAST:], skip_special_tokens=False).rstrip()
    if end.endswith(THINK_END):
        return None
    return "begun" if end.endswith(THINK_START) or parser == "deepseek_r1" else "possible"


class ReasoningSplitter:
    """Splits one answer, as it arrives, into reasoning and the rest, without space at the markers.

    The output does not depend on how the text is split."""

    def __init__(self, reasoning: Reasoning | None) -> None:
        steps = {None: self._pass, "possible": self._maybe_open, "begun": self._open}
        self._step: Callable[[str, bool], tuple[str, str]] = steps[reasoning]
        self._held_back = ""

    def add(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Return (reasoning, rest) known so far. Text that may begin a marker is held back."""
        held_back, self._held_back = self._held_back, ""
        return self._step(held_back + text, is_last)

    def _maybe_open(self, text: str, is_last: bool) -> tuple[str, str]:
        begin = text.lstrip()
        if not is_last and len(begin) < len(THINK_START) and THINK_START.startswith(begin):
            self._held_back = text
            return "", ""
        self._step = self._open if begin.startswith(THINK_START) else self._pass
        return self._step(text, is_last)

    def _open(self, text: str, is_last: bool) -> tuple[str, str]:
        """Skip the marker: some models repeat the one that the prompt ends with."""
        begin = text.lstrip()
        if not is_last and len(begin) < len(THINK_START) and THINK_START.startswith(begin):
            self._held_back = text
            return "", ""
        self._step = self._trim
        return self._trim(begin.removeprefix(THINK_START), is_last)

    def _trim(self, text: str, is_last: bool) -> tuple[str, str]:
        begin = text.lstrip()
        if not begin:
            return "", ""
        self._step = self._reason
        return self._reason(begin, is_last)

    def _reason(self, text: str, is_last: bool) -> tuple[str, str]:
        reasoning, marker, rest = text.partition(THINK_END)
        if marker:
            self._step = self._close
            return reasoning.rstrip(), self._close(rest, is_last)[1]
        certain = text
        if not is_last:
            certain = text[: len(text) - partial_marker_size(text, THINK_END)].rstrip()
        self._held_back = text[len(certain) :]
        return certain, ""

    def _close(self, text: str, is_last: bool) -> tuple[str, str]:
        rest = text.lstrip()
        if rest:
            self._step = self._pass
        return "", rest

    def _pass(self, text: str, is_last: bool) -> tuple[str, str]:
        return "", text
