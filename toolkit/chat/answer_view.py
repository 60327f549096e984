"""An answer as it comes: its pieces, what they add up to, and how fast they came."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from toolkit.chat.delta import CallPart, Delta, Usage

AT_ONCE = (
    0.001  # seconds: what comes within them was waiting in a buffer, and tells nothing of speed
)
Message = dict[str, Any]
"""As the API has it: role, content, ..."""


@dataclass(slots=True)
class Answer:
    """What has come so far. Times are seconds after the question was sent."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stopped: bool = False
    error: str | None = None  # what broke it off
    usage: Usage = field(default_factory=Usage)
    sent: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None
    thought: float | None = None  # when the reasoning ended
    pieces: int = 0

    def add(self, delta: Delta) -> None:
        """Takes a piece in."""
        if delta.is_token:
            self.last = time.monotonic() - self.sent
            self.first = self.last if self.first is None else self.first
            self.pieces += 1
            if self.reasoning and self.thought is None and not delta.reasoning:
                self.thought = self.last
        follows_thought = self.reasoning and not self.content
        self.content += delta.content.lstrip() if follows_thought else delta.content
        self.reasoning += delta.reasoning
        for position, part in enumerate(delta.calls):
            self._add_call(position if part.index is None else part.index, part)
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.usage = delta.usage or self.usage

    def _add_call(self, index: int, part: CallPart) -> None:
        while len(self.tool_calls) <= index:
            self.tool_calls.append(
                {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
        call = self.tool_calls[index]
        call["id"] = part.id or call["id"]
        if part.function is not None:
            call["function"]["name"] += part.function.name or ""
            call["function"]["arguments"] += part.function.arguments or ""

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.tool_calls)

    @property
    def message(self) -> Message:
        """The assistant's turn, as it is kept."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls and not self.stopped:
            message["tool_calls"] = self.tool_calls
        return message

    @property
    def prompt_tokens(self) -> int | None:
        return self.usage.prompt_tokens

    @property
    def cached_tokens(self) -> int | None:
        return (
            self.usage.prompt_tokens_details.cached_tokens
            if self.usage.prompt_tokens_details
            else None
        )

    @property
    def completion_tokens(self) -> int:
        """By the server's count, which comes with the end of an answer; until then the number of pieces."""
        return self.usage.completion_tokens or self.pieces

    @property
    def context_tokens(self) -> int | None:
        """Tokens of the context that the conversation fills now."""
        return None if self.prompt_tokens is None else self.prompt_tokens + self.completion_tokens

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding: without the first token and the time until it came."""
        if self.first is None or self.last is None or self.completion_tokens < 2:
            return None
        if self.last - self.first < AT_ONCE:
            return None
        return (self.completion_tokens - 1) / (self.last - self.first)

    def stats(self, max_context: int | None = None) -> str:
        """One line: time to the first token, speed, tokens in, cached and out, the share of the context in use."""
        if self.first is None:
            return ""
        parts = [f"TTFT {self.first:.2f} s"]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.1f} tok/s")
        if self.prompt_tokens is not None:
            cached = f" ({self.cached_tokens:,} cached)" if self.cached_tokens else ""
            parts.append(f"in {self.prompt_tokens:,}{cached}")
        parts.append(
            f"out {'~' if self.usage.completion_tokens is None else ''}{self.completion_tokens:,}"
        )
        if max_context and self.context_tokens is not None:
            share = self.context_tokens / max_context
            parts.append(f"context {self.context_tokens:,}/{max_context:,} ({share:.0%})")
        return " · ".join(parts)
