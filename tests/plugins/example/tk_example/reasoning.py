"""A format of reasoning: `<notes>...</notes>` before the answer."""

from toolkit.text.reasoning import ReasoningFormat


class NotesFormat(ReasoningFormat):
    start = "<notes>"
    end = "</notes>"
