"""An answer while it is streamed: text, reasoning, tool calls, token counts and speed."""

import time
from dataclasses import dataclass, field
from typing import Any

from toolkit.chat.answers.delta import CallPart, ChatDelta, Usage

MIN_INTERVAL = 0.001  # seconds; deltas closer together were buffered and do not show the speed
Message = dict[str, Any]  # A message in the API's format: role, content, ..


@dataclass(slots=True)
class Answer:
    """The part of an answer received so far. Times are in seconds since the question was sent."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    is_stopped: bool = False  # by Ctrl-C
    error: str | None = None
    exceeds_context: bool = False  # the server refused the request for its length
    usage: Usage = field(default_factory=Usage)
    sent: float = field(default_factory=time.monotonic)  # on the monotonic clock
    first_token: float | None = None
    last_token: float | None = None
    reasoning_end: float | None = None
    num_deltas: int = 0

    def add(self, delta: ChatDelta) -> None:
        if delta.has_token:
            self.last_token = time.monotonic() - self.sent
            self.first_token = self.last_token if self.first_token is None else self.first_token
            self.num_deltas += 1
            if self.reasoning and self.reasoning_end is None and not delta.reasoning:
                self.reasoning_end = self.last_token
        follows_reasoning = self.reasoning and not self.content
        self.content += delta.content.lstrip() if follows_reasoning else delta.content
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
        """The assistant message to store. A stopped answer has no tool calls."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls and not self.is_stopped:
            message["tool_calls"] = self.tool_calls
        return message

    @property
    def prompt_tokens(self) -> int | None:
        return self.usage.prompt_tokens

    @property
    def cached_tokens(self) -> int | None:
        details = self.usage.prompt_tokens_details
        return details.cached_tokens if details else None

    @property
    def completion_tokens(self) -> int:
        """The server's count, which arrives at the end; until then the number of deltas."""
        return self.usage.completion_tokens or self.num_deltas

    @property
    def context_tokens(self) -> int | None:
        """Tokens of prompt and answer."""
        return None if self.prompt_tokens is None else self.prompt_tokens + self.completion_tokens

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed, without the first token and the time to it. None if unknown."""
        if self.first_token is None or self.last_token is None or self.completion_tokens < 2:
            return None
        if self.last_token - self.first_token < MIN_INTERVAL:
            return None
        return (self.completion_tokens - 1) / (self.last_token - self.first_token)

    def stats(self, max_context: int | None = None) -> str:
        """Return one line: TTFT, speed, tokens in, cached and out, and context use."""
        if self.first_token is None:
            return ""
        parts = [f"TTFT {self.first_token:.2f} s"]
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
