"""One answer's stream: which of its events are tokens, and when they came."""

from __future__ import annotations

from array import array
from itertools import pairwise
from operator import index
from typing import Any

import msgspec
import orjson

from toolkit.bench.load.record import RequestRecord
from toolkit.client.wire import DONE, EventBuffer, RequestFailedError, error_message

TEXT_KEYS = (b'"text":', b'"text": ', b'"content":', b'"content": ')
QUOTE, BACKSLASH = b'"', ord("\\")
SAID = ("content", "reasoning_content", "reasoning", "tool_calls")
"""What a chat's piece can carry."""


class Counts(msgspec.Struct, tag="counts"):
    """What the live display shows: requests, and tokens and times to the first one, in seconds, of those so far."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0
    first_tokens: int = 0
    ttft: float = 0.0
    error: str = ""
    """The newest."""

    @property
    def running(self) -> int:
        return self.sent - self.done - self.failed


class Answer:
    """The events of a stream, as they arrive."""

    def __init__(self, record: RequestRecord, start: float, counts: Counts) -> None:
        self.record = record
        self.start = start  # of the run, by time.perf_counter
        self.counts = counts
        self.events = EventBuffer()
        self.times = array("d")  # of each piece of the answer
        self.sizes = array(
            "q"
        )  # tokens that it says it has; else 1 for a piece with text, 0 for one without
        self.counted = 0  # their sum
        self.sizes_said = False  # whether pieces come with token ids or a running count
        self.total: int | None = None  # tokens by the server's own count
        self.complete = False
        self.ends_empty = False  # whether the last piece has a finish reason and no text
        self.usual: tuple[bytes, bytes] | None = (
            None  # what is around the text of a piece of one token
        )

    def feed(self, data: bytes, read_at: float) -> None:
        """Takes bytes that were read at a moment of `time.perf_counter`."""
        now = read_at - self.start
        for event in self.events.feed(data):
            if self._is_usual(event):
                self._count(1, now)
            else:
                self._take(event, now)

    def finish(self) -> None:
        """Raises RequestFailedError when the answer did not come to its end."""
        if not self.complete:
            raise RequestFailedError(
                "answer broken off", f"after {self.counted} tokens, without an end"
            )

    def settle(self) -> None:
        """Writes into the record what came.

        Servers send an event for each token also when its text is held back or empty (half a character): where the
        server's own count agrees, such events are tokens like the others. Otherwise only text counts; where there are
        tokens and no text at all, every event.
        """
        times, sizes, known = self.times, self.sizes, self.sizes_said
        if not known and self.total in (len(sizes), len(sizes) - self.ends_empty):
            times, sizes, known = times[: self.total], array("q", [1]) * self.total, True
        elif 0 in sizes and (any(sizes) or not self.total):
            filled = [(time, size) for time, size in zip(times, sizes, strict=True) if size > 0]
            times, sizes = (
                array("d", [time for time, _ in filled]),
                array("q", [size for _, size in filled]),
            )
        record = self.record
        record.output_tokens = sum(sizes) if self.total is None else self.total
        record.sizes_known = known or sum(sizes) == self.total
        if times:
            record.first_token, record.last_token = times[0], times[-1]
            record.gaps = array("d", [after - before for before, after in pairwise(times)])
            record.sizes = sizes[1:]

    def _is_usual(self, event: bytes) -> bool:
        """Whether it differs from an earlier piece of one token in its text alone, and has one. Most do, and need not
        be parsed.
        """
        if self.usual is None:
            return False
        head, tail = self.usual
        end = len(event) - len(tail)
        return (
            end > len(head)
            and event.startswith(head)
            and event.endswith(tail)
            and event.find(QUOTE, len(head), end) < 0
            and event[end - 1] != BACKSLASH
        )

    def _take(self, data: bytes, now: float) -> None:
        if data == DONE:
            self.complete = True
            return
        try:
            event: dict[str, Any] = orjson.loads(data)
            usage = event.get("usage")
            choices = event.get("choices")
            counted = self._take_usage(usage) if usage else False
            if choices:
                self._piece(data, choices[0], now, counted=counted)
            elif "error" in event:
                raise RequestFailedError("error in the stream", error_message(data))
        except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
            raise RequestFailedError(
                "unreadable event", data.decode(errors="replace")[:200]
            ) from None

    def _take_usage(self, usage: dict[str, Any]) -> bool:
        """Whether it says how many tokens the answer has until now; servers leave out, or null, what they do not count."""
        record, total = self.record, usage.get("completion_tokens")
        if total is not None:
            self.total = index(total)
        if (prompt := usage.get("prompt_tokens")) is not None:
            record.prompt_tokens = index(prompt)
        if (cached := (usage.get("prompt_tokens_details") or {}).get("cached_tokens")) is not None:
            record.cached_tokens = index(cached)
        return total is not None

    def _piece(self, data: bytes, choice: dict[str, Any], now: float, *, counted: bool) -> None:
        """One piece of the answer; `counted` when it comes with the tokens until now."""
        delta = choice.get("delta") or {}
        said = [choice.get("text"), *(delta.get(key) for key in SAID)]
        ends = bool(choice.get("finish_reason"))
        self.complete |= ends
        self.ends_empty = ends and not any(said)
        ids = choice.get("token_ids")
        self.sizes_said |= not self.times and (counted or ids is not None)
        if self.sizes_said and (counted or ids is not None):
            carried = len(ids) if ids is not None else max(0, (self.total or 0) - self.counted)
            self._count(carried, now)
        elif any(said):
            self._count(1, now)
            if not ends:
                self.usual = _around(data, said[0] or said[1])
        elif self.times or "role" not in delta:  # a chat begins with a piece that says who speaks
            self._count(0, now)

    def _count(self, carried: int, now: float) -> None:
        if not self.times:
            self.counts.first_tokens += 1
            self.counts.ttft += now - self.record.scheduled
        self.counted += carried
        self.counts.tokens += carried
        self.times.append(now)
        self.sizes.append(carried)


def _around(data: bytes, text: object) -> tuple[bytes, bytes] | None:
    """The event's bytes before and after its text; None where the text is not found as it was expected."""
    if not isinstance(text, str):
        return None
    quoted = orjson.dumps(text)
    for key in TEXT_KEYS:
        head, found, tail = data.partition(key + quoted)
        if found:
            return head + key + QUOTE, QUOTE + tail
    return None
