"""The messages of a conversation, in the API's format."""

from dataclasses import dataclass, field
from typing import Any

from toolkit.chat.answers.answer_view import Message
from toolkit.chat.images import LABEL

SENT_KEYS = ("role", "content", "tool_calls", "tool_call_id")  # the reasoning is not sent back


@dataclass(slots=True)
class Conversation:
    """Messages that are sent with every question.

    Every question in `messages` has an answer. A question without one is in `unanswered`."""

    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    unanswered: list[Message] | None = None
    skipped: int = 0  # messages at the beginning that are no longer sent

    def build_messages(self, new: list[Message]) -> list[Message]:
        """Return the messages to send: the history, then `new`."""
        head: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        history = [*self.messages[self.skipped :], *new]
        return head + [_sent(message) for message in history]

    @property
    def has_older_turns(self) -> bool:
        """True if more than the last turn is sent."""
        return len([one for one in self.messages[self.skipped :] if one["role"] == "user"]) > 1

    @property
    def sent_characters(self) -> int:
        return sum(len(text_of(message)) for message in self.messages[self.skipped :])

    def skip_oldest(self, *, keeps_last: bool) -> bool:
        """Leave the oldest turn out of what is sent. Return False if there is none.

        `keeps_last`: the last turn is not left out."""
        starts = [i for i, one in enumerate(self.messages) if one["role"] == "user"]
        later = [i for i in starts if i > self.skipped]
        if not later:
            if keeps_last or self.skipped == len(self.messages):
                return False
            later = [len(self.messages)]
        self.skipped = later[0]
        return True

    def append(self, new: list[Message], answer: Message) -> None:
        self.messages += [*new, answer]
        self.unanswered = None

    def pop_question(self) -> list[Message]:
        """Remove the last question with all messages after it, and return the question.

        An unanswered question comes first; it may be the results of tool calls. Returns an empty
        list if nothing was asked."""
        if self.unanswered is not None:
            question, self.unanswered = self.unanswered, None
            return question
        questions = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not questions:
            return []
        question = [self.messages[questions[-1]]]
        del self.messages[questions[-1] :]
        self.skipped = min(self.skipped, len(self.messages))
        return question

    @property
    def last_message(self) -> Message | None:
        return self.messages[-1] if self.messages else None

    @property
    def pending_calls(self) -> list[dict[str, Any]]:
        """Tool calls of the last message, which need results."""
        return (self.last_message or {}).get("tool_calls") or []

    @property
    def num_questions(self) -> int:
        return sum(message["role"] == "user" for message in self.messages)

    @property
    def title(self) -> str:
        """The first question, shortened."""
        return next((shorten(text_of(m)) for m in self.messages if m["role"] == "user"), "")

    def to_markdown(self) -> str:
        parts = [f"## system\n\n{self.system}"] if self.system else []
        for message in self.messages:
            text = text_of(message)
            for call in message.get("tool_calls") or []:
                text += f"\n\n```\n{format_call(call)}\n```"
            parts.append(f"## {message['role']}\n\n{text.strip()}")
        return "\n\n".join(parts) + "\n"


def text_of(message: Message) -> str:
    """Return the text of a message, with '[image NAME WIDTHxHEIGHT]' for each image."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(
        part["text"] if part["type"] == "text" else f"[image {part.get(LABEL, '')}".rstrip() + "]"
        for part in content
    )


def _sent(message: Message) -> Message:
    """Return what is sent of a message."""
    sent = {key: message[key] for key in SENT_KEYS if key in message}
    if isinstance(sent.get("content"), list):
        sent["content"] = [
            {key: value for key, value in part.items() if key != LABEL} for part in sent["content"]
        ]
    return sent


def shorten(text: str) -> str:
    """Return the text on one line, cut to 60 characters."""
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:59] + "…"


def format_call(call: dict[str, Any]) -> str:
    """Return a tool call as `name({"argument": ...})`."""
    return f"{call['function']['name']}({call['function']['arguments']})"
