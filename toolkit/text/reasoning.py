"""Answers of models that reason first: `<think>...</think>`, and then what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from toolkit.text.tokenizer import Tokenizer
from toolkit.text.tool_formats import overlap

THINK, END_OF_THINKING = "<think>", "</think>"
_LAST = 8
"""Tokens at a prompt's end among which a template's mark is looked for."""

Reasoning = Literal["begun", "possible"]
"""How an answer begins: with reasoning, which its prompt has begun; or with reasoning where it begins with `<think>`."""


def reasoning_after(
    prompt: list[int], tokenizer: Tokenizer, parser: str | None
) -> Reasoning | None:
    """How the answer to a prompt begins, by the prompt's end; None: without reasoning."""
    if parser is None:
        return None
    end = tokenizer.decode(prompt[-_LAST:], skip_special_tokens=False).rstrip()
    if end.endswith(END_OF_THINKING):
        return None
    return "begun" if end.endswith(THINK) or parser == "deepseek_r1" else "possible"


class ReasoningSplitter:
    """Splits one answer, as it comes, into its reasoning and the rest, neither with the space around the marks. The same
    in whatever pieces it comes.
    """

    def __init__(self, reasoning: Reasoning | None) -> None:
        steps = {None: self._pass, "possible": self._maybe_begin, "begun": self._open}
        self._step: Callable[[str, bool], tuple[str, str]] = steps[reasoning]
        self._held = ""

    def add(self, text: str, *, ended: bool = False) -> tuple[str, str]:
        """(reasoning, rest) that more text makes certain; `ended`: no more comes."""
        held, self._held = self._held, ""
        return self._step(held + text, ended)

    def _maybe_begin(self, text: str, ended: bool) -> tuple[str, str]:
        begin = text.lstrip()
        if not ended and len(begin) < len(THINK) and THINK.startswith(begin):
            self._held = text
            return "", ""
        self._step = self._open if begin.startswith(THINK) else self._pass
        return self._step(text, ended)

    def _open(self, text: str, ended: bool) -> tuple[str, str]:
        """Before the first of the reasoning: some models repeat the mark that the prompt ends with."""
        begin = text.lstrip()
        if not ended and len(begin) < len(THINK) and THINK.startswith(begin):
            self._held = text
            return "", ""
        self._step = self._trim
        return self._trim(begin.removeprefix(THINK), ended)

    def _trim(self, text: str, ended: bool) -> tuple[str, str]:
        begin = text.lstrip()
        if not begin:
            return "", ""
        self._step = self._within
        return self._within(begin, ended)

    def _within(self, text: str, ended: bool) -> tuple[str, str]:
        reasoning, mark, rest = text.partition(END_OF_THINKING)
        if mark:
            self._step = self._close
            return reasoning.rstrip(), self._close(rest, ended)[1]
        certain = text if ended else text[: len(text) - overlap(text, END_OF_THINKING)].rstrip()
        self._held = text[len(certain) :]
        return certain, ""

    def _close(self, text: str, ended: bool) -> tuple[str, str]:
        """Before the first of what comes after."""
        rest = text.lstrip()
        if rest:
            self._step = self._pass
        return "", rest

    def _pass(self, text: str, ended: bool) -> tuple[str, str]:
        return "", text
