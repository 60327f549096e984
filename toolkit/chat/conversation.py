"""What has been said. The turns alternate: a question is kept only together with its answer."""

from __future__ import annotations

from dataclasses import dataclass, field

Message = dict[str, str]  # role, content


@dataclass(slots=True)
class Conversation:
    """The history that goes back to the server with every question."""

    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)  # question, answer
    unanswered: str | None = None  # the last question, when it got no answer

    def messages(self, question: str) -> list[Message]:
        """The history and a new question, as the API takes them."""
        found = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in self.turns:
            found.append({"role": "user", "content": asked})
            found.append({"role": "assistant", "content": answered})
        found.append({"role": "user", "content": question})
        return found

    def close(self, question: str, answer: str) -> None:
        """Keeps a turn. Without an answer the question waits to be asked again."""
        if answer:
            self.turns.append((question, answer))
            self.unanswered = None
        else:
            self.unanswered = question

    def take_back(self) -> str | None:
        """Removes the last turn, and returns its question for another try; None when nothing was asked."""
        if self.unanswered is not None:
            return self.unanswered
        return self.turns.pop()[0] if self.turns else None

    def clear(self) -> None:
        """Forgets everything but the system message."""
        self.turns.clear()
        self.unanswered = None

    def transcript(self) -> str:
        """The conversation to read, and to keep in a file."""
        parts = [f"system: {self.system}"] if self.system else []
        for asked, answered in self.turns:
            parts += [f"user: {asked}", f"assistant: {answered}"]
        return "\n\n".join(parts) + "\n"
