"""Reasoning that a server leaves in the answer, between `<think>` and `</think>`."""

from dataclasses import replace

from toolkit.chat.answers.delta import ChatDelta
from toolkit.sampling.params import THINK_END, THINK_START


class ThinkTagSplitter:
    """Separates reasoning at the start of an answer from the rest. A tag may span deltas."""

    def __init__(self) -> None:
        self._held_back = ""  # may be a tag or the beginning of one
        self._tag: str | None = THINK_START  # the tag to find next; None: no more

    def split(self, delta: ChatDelta) -> ChatDelta:
        """Move the reasoning in the delta's content to its `reasoning`."""
        if self._tag is None or not delta.content:
            return delta
        self._held_back += delta.content
        if self._tag == THINK_START:
            text = self._held_back.lstrip()
            if len(text) < len(THINK_START) and THINK_START.startswith(text):
                return replace(delta, content="")
            if not text.startswith(THINK_START):
                self._tag = None
                return replace(delta, content=self._take(len(self._held_back)))
            self._tag, self._held_back = THINK_END, text.removeprefix(THINK_START)
        reasoning, has_ended, content = self._held_back.partition(THINK_END)
        if has_ended:
            self._tag = None
            return replace(delta, reasoning=delta.reasoning + reasoning, content=content.lstrip())
        certain = self._take(self._num_certain())
        return replace(delta, reasoning=delta.reasoning + certain, content="")

    def flush(self) -> ChatDelta:
        """Return the text that was held back, at the end of the answer."""
        tag, text = self._tag, self._take(len(self._held_back))
        if tag == THINK_END:
            return ChatDelta(reasoning=text)
        return ChatDelta(content=text) if tag else ChatDelta()

    def _take(self, count: int) -> str:
        taken, self._held_back = self._held_back[:count], self._held_back[count:]
        return taken

    def _num_certain(self) -> int:
        """Return the number of characters that cannot belong to the end tag."""
        sizes = range(len(THINK_END) - 1, 0, -1)
        return len(self._held_back) - next(
            (size for size in sizes if self._held_back.endswith(THINK_END[:size])), 0
        )
