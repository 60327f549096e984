"""Keeps a conversation within the model's context: leaves out the oldest turns, and warns."""

from dataclasses import dataclass

from toolkit.chat.answers.answer_view import Answer, Message
from toolkit.chat.history import Conversation, text_of

WARN = 0.85  # part of the context
KEPT = 0.5  # part that is kept, so that the next turns find the server's prefix cache
RESERVED = 0.125  # part for the answer, if --max-tokens is not less
CHARACTERS = 3  # of a token, at least, in most texts
MARGIN = 16  # tokens: an answer that ended within so many of the end of the context filled it


@dataclass(slots=True)
class ContextGauge:
    """Size of the context, and the tokens of the last request and answer, as far as known."""

    size: int | None
    used: int = 0  # 0: not known

    def note(self, answer: Answer) -> None:
        self.used = answer.context_tokens or self.used

    @property
    def is_full(self) -> bool:
        return self.size is not None and self.used > self.size - MARGIN

    @property
    def warning(self) -> str:
        """A phrase, empty below WARN."""
        if self.size is None or self.used < WARN * self.size:
            return ""
        return f"{min(self.used / self.size, 1.0):.0%} of the context is used"

    def make_room(
        self, conversation: Conversation, new: list[Message], max_tokens: int | None
    ) -> int:
        """Leave out the oldest turns if the next request would have no room. Return their number.

        The sizes of turns are estimated by their characters: the server reports only the sum."""
        if self.size is None or not self.used:
            return 0
        reserved = min(max_tokens or self.size, int(RESERVED * self.size))
        needed = self.used + sum(len(text_of(one)) for one in new) // CHARACTERS
        if needed + reserved <= self.size:
            return 0
        count = 0
        while needed > KEPT * self.size:
            before = conversation.sent_characters
            if not conversation.skip_oldest(keeps_last=not asks(new)):
                break
            freed = self.used - int(self.used * conversation.sent_characters / (before or 1))
            needed, self.used, count = needed - freed, self.used - freed, count + 1
        return count


def asks(new: list[Message]) -> bool:
    """Return True if new messages begin a turn: others need the turn before them."""
    return bool(new) and new[0]["role"] == "user"
