"""Times the tokens of a streamed answer."""

from array import array
from itertools import pairwise
from operator import index
from typing import Any

import msgspec
import orjson

from toolkit.bench.load.record import RequestRecord
from toolkit.client.wire import DONE, EventBuffer, RequestFailedError, error_message

TEXT_KEYS = (b'"text":', b'"text": ', b'"content":', b'"content": ', b'"delta":')
QUOTE, BACKSLASH = b'"', ord("\\")
OUTPUT_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Fields of a chat delta that carry output."""


class LiveCounts(msgspec.Struct, tag="counts"):
    """Running totals for the live display."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0
    first_tokens: int = 0  # requests that have one
    ttft: float = 0.0  # sum over those requests, in seconds
    error: str = ""  # the latest

    @property
    def running(self) -> int:
        return self.sent - self.done - self.failed


class StreamTimer:
    """Counts and times the tokens of one stream as its events arrive."""

    def __init__(self, record: RequestRecord, start: float, counts: LiveCounts) -> None:
        self.record = record
        self.start = start  # time.perf_counter() at the start of the run
        self.counts = counts
        self.events = EventBuffer()
        self.times = array("d")  # arrival of each chunk
        # Tokens of each chunk. If the server does not report them: 1 with text, 0 without.
        self.chunk_tokens = array("q")
        self.num_tokens = 0  # sum of chunk_tokens
        self.has_chunk_counts = False  # chunks carry token ids or a running count
        self.reported_tokens: int | None = None  # completion tokens by the server's count
        self.is_complete = False
        self.ends_empty = False  # the last chunk has a finish reason and no text
        # Bytes before and after the text in a chunk of one token.
        self.token_frame: tuple[bytes, bytes] | None = None

    def feed(self, data: bytes, read_at: float) -> None:
        """Process bytes that were read at `read_at`, by `time.perf_counter`."""
        now = read_at - self.start
        for event in self.events.feed(data):
            if self._is_plain_token(event):
                self._add_chunk(1, now)
            else:
                self._parse_event(event, now)

    def check_complete(self) -> None:
        """Raise RequestFailedError if the answer did not reach its end."""
        if not self.is_complete:
            raise RequestFailedError(
                "incomplete answer", f"the stream ended after {self.num_tokens} tokens"
            )

    def write_record(self) -> None:
        """Write counts and times into the record.

        Servers send an event for every token, also when its text is held back or empty (half a
        character). If the server's own count agrees, such events count as tokens. Otherwise only
        events with text count, or all events if none has text although there are tokens."""
        times, sizes, is_known = self.times, self.chunk_tokens, self.has_chunk_counts
        total = self.reported_tokens
        if not is_known and total in (len(sizes), len(sizes) - self.ends_empty):
            times, sizes, is_known = times[:total], array("q", [1]) * total, True
        elif 0 in sizes and (any(sizes) or not total):
            filled = [(time, size) for time, size in zip(times, sizes, strict=True) if size > 0]
            times = array("d", [time for time, _ in filled])
            sizes = array("q", [size for _, size in filled])
        record = self.record
        record.output_tokens = sum(sizes) if total is None else total
        record.has_token_counts = is_known or sum(sizes) == total
        if times:
            record.first_token, record.last_token = times[0], times[-1]
            record.chunk_gaps = array("d", [after - before for before, after in pairwise(times)])
            record.chunk_tokens = sizes[1:]

    def _is_plain_token(self, event: bytes) -> bool:
        """True if only the text differs from an earlier one-token event: no parsing is needed."""
        if self.token_frame is None:
            return False
        head, tail = self.token_frame
        end = len(event) - len(tail)
        return (
            end > len(head)
            and event.startswith(head)
            and event.endswith(tail)
            and event.find(QUOTE, len(head), end) < 0
            and event[end - 1] != BACKSLASH
        )

    def _parse_event(self, data: bytes, now: float) -> None:
        if data == DONE:
            self.is_complete = True
            return
        try:
            event: dict[str, Any] = orjson.loads(data)
            usage = event.get("usage")
            choices = event.get("choices")
            has_count = self._read_usage(usage) if usage else False
            if choices:
                self._parse_chunk(data, choices[0], now, has_count=has_count)
            elif event.get("type", "").startswith("transcript.text."):
                self._parse_transcript(data, event, now, has_count=has_count)
            elif "error" in event:
                raise RequestFailedError("error in the stream", error_message(data))
        except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
            raise RequestFailedError(
                "malformed event", data.decode(errors="replace")[:200]
            ) from None

    def _read_usage(self, usage: dict[str, Any]) -> bool:
        """Store the counts of a usage object, each optional. True if it has completion tokens."""
        record, total = self.record, usage.get("completion_tokens")
        if total is not None:
            self.reported_tokens = index(total)
        if (prompt := usage.get("prompt_tokens")) is not None:
            record.prompt_tokens = index(prompt)
        if (cached := (usage.get("prompt_tokens_details") or {}).get("cached_tokens")) is not None:
            record.cached_tokens = index(cached)
        return total is not None

    def _parse_chunk(
        self, data: bytes, choice: dict[str, Any], now: float, *, has_count: bool
    ) -> None:
        """Count one chunk. `has_count`: its usage has the completion tokens so far."""
        delta = choice.get("delta") or {}
        outputs = [choice.get("text"), *(delta.get(key) for key in OUTPUT_KEYS)]
        is_last = bool(choice.get("finish_reason"))
        self.is_complete |= is_last
        self.ends_empty = is_last and not any(outputs)
        ids = choice.get("token_ids")
        has_count |= ids is not None
        self.has_chunk_counts |= not self.times and has_count
        if self.has_chunk_counts and has_count:
            if ids is not None:
                num_tokens = len(ids)
            else:
                num_tokens = max(0, (self.reported_tokens or 0) - self.num_tokens)
            self._add_chunk(num_tokens, now)
        elif any(outputs):
            self._add_chunk(1, now)
            if not is_last:
                self.token_frame = _split_at_text(data, outputs[0] or outputs[1])
        elif self.times or "role" not in delta:  # the first chunk of a chat only has the role
            self._add_chunk(0, now)

    def _parse_transcript(
        self, data: bytes, event: dict[str, Any], now: float, *, has_count: bool
    ) -> None:
        """Count an event of a transcript. The last one repeats the complete text."""
        self.is_complete |= event["type"] == "transcript.text.done"
        text = event.get("delta")
        if has_count:
            self.has_chunk_counts = True
            if num_new := (self.reported_tokens or 0) - self.num_tokens:
                self._add_chunk(num_new, now)
        elif text:
            self._add_chunk(1, now)
            self.token_frame = _split_at_text(data, text)

    def _add_chunk(self, num_tokens: int, now: float) -> None:
        if not self.times:
            self.counts.first_tokens += 1
            self.counts.ttft += now - self.record.scheduled
        self.num_tokens += num_tokens
        self.counts.tokens += num_tokens
        self.times.append(now)
        self.chunk_tokens.append(num_tokens)


def _split_at_text(data: bytes, text: object) -> tuple[bytes, bytes] | None:
    """Return the event's bytes before and after its text, or None if the text is not found."""
    if not isinstance(text, str):
        return None
    quoted = orjson.dumps(text)
    for key in TEXT_KEYS:
        head, found, tail = data.partition(key + quoted)
        if found:
            return head + key + QUOTE, QUOTE + tail
    return None
