"""What has been said, as the API takes it, and how it is taken back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from toolkit.chat.answer_view import Message

SENT = ("role", "content", "tool_calls", "tool_call_id")
"""What of a kept message goes back to the server; the reasoning does not."""


@dataclass(slots=True)
class Conversation:
    """The history that goes back to the server with every question. The last message is never an open question: one
    that got no answer is put aside, to be asked again.
    """

    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    unanswered: list[Message] | None = None

    def request(self, new: list[Message]) -> list[Message]:
        """The history, and new messages after it."""
        found: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return found + [{key: m[key] for key in SENT if key in m} for m in [*self.messages, *new]]

    def keep(self, new: list[Message], answer: Message) -> None:
        """Takes in messages and their answer."""
        self.messages += [*new, answer]
        self.unanswered = None

    def take_back(self) -> list[Message]:
        """Removes the last question and what followed it, and returns the question (with results of tools, if its
        answer began with them); empty when nothing was asked.
        """
        if self.unanswered is not None:
            question, self.unanswered = self.unanswered, None
            return question
        answers = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not answers:
            return []
        question = [self.messages[answers[-1]]]
        del self.messages[answers[-1] :]
        return question

    @property
    def answer(self) -> Message | None:
        """The last answer."""
        return self.messages[-1] if self.messages else None

    @property
    def open_calls(self) -> list[dict[str, Any]]:
        """Calls of tools in the last answer, whose results the model waits for."""
        return (self.answer or {}).get("tool_calls") or []

    @property
    def num_questions(self) -> int:
        return sum(message["role"] == "user" for message in self.messages)

    @property
    def title(self) -> str:
        """The first question, in short."""
        return next((short(text_of(m)) for m in self.messages if m["role"] == "user"), "")

    def transcript(self) -> str:
        """The conversation in Markdown, to read."""
        parts = [f"## system\n\n{self.system}"] if self.system else []
        for message in self.messages:
            text = text_of(message)
            for call in message.get("tool_calls") or []:
                text += f"\n\n```\n{call_text(call)}\n```"
            parts.append(f"## {message['role']}\n\n{text.strip()}")
        return "\n\n".join(parts) + "\n"


def text_of(message: Message) -> str:
    """What a message says; of an image, that there is one."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else "[image]" for part in content)


def short(text: str) -> str:
    """The beginning of a text, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:59] + "…"


def call_text(call: dict[str, Any]) -> str:
    """A call of a tool as `name({"argument": ...})`."""
    return f"{call['function']['name']}({call['function']['arguments']})"
