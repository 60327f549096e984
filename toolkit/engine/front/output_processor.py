"""Turn tokens from the core into text: detokenization, stop strings, log-probabilities."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import repeat
from weakref import proxy

import numpy as np

from toolkit.engine.messages import EngineOutput, EngineOutputs, EngineRequest
from toolkit.engine.outputs import (
    CompletionOutput,
    Delta,
    LogprobList,
    Position,
    PositionLogprobs,
    RequestOutput,
)
from toolkit.sampling.params import SamplingParams
from toolkit.scheduler.output import record_length
from toolkit.text.tokenizer import TextStream, Tokenizer, text_stream


class IncrementalDetokenizer:
    """Text of one answer as it is generated. Holds back text that may begin a stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.stream = text_stream(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._min_tokens = params.min_tokens
        self._stops = params.stop_strings
        self._heads = frozenset(stop[0] for stop in self._stops)
        self._include_stop = params.include_stop_str_in_output
        self._held = ""
        self._num_immune = 0
        """Held characters from before `min_tokens`; a stop string that ends in them is ignored."""
        self._num_tokens = 0

    def add(self, token_ids: list[int], ended: bool) -> tuple[str, str | None]:
        """Return (text to show, stop string found or None). `ended`: these are the last tokens."""
        self._num_tokens += len(token_ids)
        text = (
            self.stream.add_one(token_ids[0]) if len(token_ids) == 1 else self.stream.add(token_ids)
        )
        text = self._held + text
        if ended:
            text += self.stream.end()
        if self._heads.isdisjoint(text):  # no stop string begins in it
            self._held = ""
            return text, None
        if self._num_tokens < self._min_tokens:
            self._num_immune = len(text)
        stop, at = self._first_stop(text)
        if stop is not None:
            self._held = ""
            return text[: at + (len(stop) if self._include_stop else 0)], stop
        keep = 0 if ended else max(_overlap(text, stop) for stop in self._stops)
        certain = len(text) - keep
        self._held = text[certain:]
        self._num_immune = max(0, self._num_immune - certain)
        return text[:certain], None

    def _first_stop(self, text: str) -> tuple[str | None, int]:
        """Return (stop string that begins first, its position) after the immune characters."""
        ends_after = self._num_immune
        found = [
            (text.find(stop, max(0, ends_after - len(stop) + 1)), stop) for stop in self._stops
        ]
        at, stop = min(((at, stop) for at, stop in found if at >= 0), default=(-1, None))
        return stop, at


@dataclass(slots=True, eq=False)
class SequenceState:
    """One answer of a request in the front end. Times are on the monotonic clock."""

    request: RequestState  # a proxy: a cycle would keep ended requests until garbage collection
    index: int
    number: int
    detokenizer: IncrementalDetokenizer | None  # None if no text is needed
    stream: TextStream | None  # receives plain tokens. None if stop strings must be found
    record_size: int  # bytes of its part of a record in the columns. 0: it wants no logprobs
    delta: Delta | None = None  # output not read yet
    is_finished: bool = False
    token_ids: list[int] = field(default_factory=list)
    """All tokens so far. If the core dies, another continues after them."""
    first_token: float = 0.0
    last_token: float = 0.0
    num_preemptions: int = 0
    num_accepted_drafts: int = 0  # known at the end, like `num_rejected_drafts`
    num_rejected_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def add_delta(self, delta: Delta) -> None:
        """Add output and wake the reader."""
        if self.delta is not None:
            _merge(self.delta, delta)
            return
        self.delta = delta
        self.request.unread.append(self)
        self.request.wake()

    def end(self, reason: str) -> None:
        """End the sequence in the front end."""
        self.is_finished = True
        self.add_delta(Delta(self.index, "", [], finish_reason=reason))


@dataclass(slots=True, eq=False, weakref_slot=True)
class RequestState:
    """A request in the front end."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    sequences: list[SequenceState] = field(default_factory=list)
    wake: Callable[[], None] = lambda: None
    """Called when a sequence without unread output gets some."""
    unread: deque[SequenceState] = field(default_factory=deque)
    """Sequences with unread output, in the order in which they got it."""
    num_cached_tokens: int = 0
    num_finished: int = 0
    has_prompt_logprobs: bool = False
    num_prompt_logprobs: int = 0  # prompt positions that have been reported
    num_feature_tokens: int = 0  # of pictures or clips in the prompt

    @property
    def is_finished(self) -> bool:
        return self.num_finished == len(self.sequences)

    @property
    def unfinished_numbers(self) -> list[int]:
        return [sequence.number for sequence in self.sequences if not sequence.is_finished]

    def next_delta(self) -> Delta | None:
        """Return unread output of the sequence that has waited longest; None if there is none."""
        if not self.unread:
            return None
        sequence = self.unread.popleft()
        delta, sequence.delta = sequence.delta, None
        return delta


@dataclass(slots=True)
class StepChanges:
    """Effects of a step's message."""

    stopped: list[int] = field(default_factory=list)
    """Sequences that met a stop string. The core continues them until it gets an Abort."""
    gaps: dict[float, int] = field(default_factory=dict)
    """New tokens, counted by the time of their sequence's previous token."""
    started: list[SequenceState] = field(default_factory=list)
    """Sequences that got their first token."""
    finished: list[tuple[SequenceState, str]] = field(default_factory=list)
    """Ended sequences with their finish reasons."""


class OutputProcessor:
    """Turns the messages of cores into deltas of the open requests."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.requests: dict[str, RequestState] = {}
        self._sequences: dict[int, SequenceState] = {}
        self._next_number = 0

    def add(self, request: EngineRequest, prompt: str | None) -> RequestState:
        """Register a request and number its sequences."""
        params = request.spec.params
        state = RequestState(request.id, prompt, request.spec.prompt_token_ids, params)
        state.num_feature_tokens = sum(one.num_rows for one in request.spec.features)
        request.number = self._next_number
        self._next_number += params.n
        record_size = 0 if params.logprobs is None else 4 * record_length(params.logprobs)
        for index in range(params.n):
            detokenizer = (
                IncrementalDetokenizer(self.tokenizer, params)
                if self.tokenizer and params.detokenize
                else None
            )
            stream = detokenizer.stream if detokenizer and not params.stop_strings else None
            number = request.number + index
            sequence = SequenceState(proxy(state), index, number, detokenizer, stream, record_size)
            state.sequences.append(sequence)
            self._sequences[sequence.number] = sequence
        self.requests[request.id] = state
        return state

    def find(self, number: int) -> SequenceState | None:
        """Return the sequence with this number, or None if it has ended."""
        return self._sequences.get(number)

    def remove(self, request_id: str) -> RequestState | None:
        """Remove a request. Output that arrives later is dropped."""
        state = self.requests.pop(request_id, None)
        if state is not None:
            for sequence in state.sequences:
                self._sequences.pop(sequence.number, None)
        return state

    def process(self, message: EngineOutputs, now: float) -> StepChanges:
        """Turn a step's tokens into deltas. `now`: arrival time of the message."""
        changes = StepChanges()
        for output in message.outputs:
            sequence = self._sequences.get(output.number)
            if sequence is not None:
                self._process_one(sequence, output, now, changes)
        if message.numbers:
            self._process_columns(message, now, changes)
        return changes

    def _process_columns(self, message: EngineOutputs, now: float, changes: StepChanges) -> None:
        """Process sequences that got one token and nothing else.

        A busy server runs this loop for every token, so it does as little as possible."""
        numbers = np.frombuffer(message.numbers, np.int64).tolist()
        tokens = np.frombuffer(message.token_ids, np.int32).tolist()
        records: Iterable[bytes] = repeat(b"", len(numbers))
        if message.logprobs is not None:
            records = message.logprobs.split()
        find, gaps = self._sequences.get, changes.gaps
        for number, token, record in zip(numbers, tokens, records, strict=True):
            sequence = find(number)
            if sequence is None:
                continue
            last = sequence.last_token
            gaps[last] = gaps.get(last, 0) + 1
            sequence.last_token = now
            sequence.token_ids.append(token)
            if sequence.stream is not None:
                text = sequence.stream.add_one(token)
            elif sequence.detokenizer is None:
                text = ""
            else:
                text, stop = sequence.detokenizer.add([token], False)
                if stop is not None:
                    stopped = Delta(sequence.index, text, [token], self._list_of(record, sequence))
                    self._stop(sequence, stopped, stop, changes)
                    continue
            delta = sequence.delta
            if delta is None:
                request = sequence.request
                sequence.delta = Delta(
                    sequence.index,
                    text,
                    [token],
                    self._list_of(record, sequence),
                    num_cached_tokens=request.num_cached_tokens,
                )
                request.unread.append(sequence)
                request.wake()
            else:
                delta.text += text
                delta.token_ids.append(token)
                if delta.logprobs is not None:
                    delta.logprobs.append_record(record[: sequence.record_size])
                elif sequence.record_size:
                    delta.logprobs = self._list_of(record, sequence)

    def _process_one(
        self, sequence: SequenceState, output: EngineOutput, now: float, changes: StepChanges
    ) -> None:
        state = sequence.request
        if sequence.index == 0:  # its siblings find the blocks that it has just computed
            state.num_cached_tokens = output.num_cached_tokens or state.num_cached_tokens
        if output.token_ids:
            if sequence.num_tokens:
                changes.gaps[sequence.last_token] = changes.gaps.get(sequence.last_token, 0) + 1
            else:
                sequence.first_token = now
                changes.started.append(sequence)
            sequence.last_token = now
            if state.params.max_tokens == 0:
                _drop_answer(output)
            sequence.token_ids += output.token_ids
        sequence.num_preemptions = output.num_preemptions
        sequence.num_accepted_drafts = output.num_accepted_drafts
        sequence.num_rejected_drafts = output.num_rejected_drafts
        text, stop = "", None
        if sequence.detokenizer is not None:
            visible = self._visible(output, state.params)
            text, stop = sequence.detokenizer.add(visible, output.finish_reason is not None)
        delta = Delta(
            sequence.index, text, output.token_ids, num_cached_tokens=state.num_cached_tokens
        )
        delta.error, delta.embedding = output.error, output.embedding
        delta.num_preemptions = output.num_preemptions
        if (found := output.logprobs) is not None:
            delta.logprobs = LogprobList(self.tokenizer, found.size, found.data)
        if (found := output.prompt_logprobs) is not None:
            delta.prompt_logprobs = LogprobList(self.tokenizer, found.size, found.data)
            state.num_prompt_logprobs += len(delta.prompt_logprobs)
        if state.params.prompt_logprobs is not None and not state.has_prompt_logprobs:
            state.has_prompt_logprobs = True
            delta.prompt_logprobs = delta.prompt_logprobs or LogprobList(self.tokenizer)
            delta.prompt_logprobs.starts_prompt = True
        if stop is not None:
            self._stop(sequence, delta, stop, changes, in_core=output.finish_reason is None)
        elif output.finish_reason is not None:
            self._finish(sequence, delta, output.finish_reason, output.stop_reason, changes)
        else:
            sequence.add_delta(delta)

    def _stop(
        self,
        sequence: SequenceState,
        delta: Delta,
        stop: str,
        changes: StepChanges,
        *,
        in_core: bool = True,
    ) -> None:
        if in_core:
            changes.stopped.append(sequence.number)
        self._finish(sequence, delta, "stop", stop, changes)

    def _finish(
        self,
        sequence: SequenceState,
        delta: Delta,
        reason: str,
        stop_reason: int | str | None,
        changes: StepChanges,
    ) -> None:
        delta.finish_reason, delta.stop_reason = reason, stop_reason
        changes.finished.append((sequence, reason))
        sequence.is_finished = True
        state = sequence.request
        state.num_finished += 1
        del self._sequences[sequence.number]
        if state.is_finished:
            del self.requests[state.id]
        sequence.add_delta(delta)

    def _visible(self, output: EngineOutput, params: SamplingParams) -> list[int]:
        """Return the tokens that become text. Excludes the end token unless the user wants it."""
        ended_by_token = output.finish_reason == "stop" and output.token_ids
        if ended_by_token and not params.include_stop_str_in_output:
            return output.token_ids[:-1]
        return output.token_ids

    def _list_of(
        self, record: bytes, sequence: SequenceState
    ) -> LogprobList[PositionLogprobs] | None:
        """Return the list of one record, without what other sequences of the step want.

        None if the sequence wants no log-probabilities."""
        if not sequence.record_size:
            return None
        record = record[: sequence.record_size]
        return LogprobList(self.tokenizer, len(record), record)


@dataclass(slots=True)
class OutputCollector:
    """Merges deltas into a RequestOutput."""

    output: RequestOutput
    states: list[CompletionOutput] = field(default_factory=list)

    @classmethod
    def of(cls, state: RequestState) -> OutputCollector:
        outputs = [CompletionOutput(index=i) for i in range(len(state.sequences))]
        return cls(RequestOutput(state.id, state.prompt, state.prompt_token_ids, outputs), outputs)

    def add(self, delta: Delta) -> None:
        one = self.states[delta.index]
        one.text += delta.text
        one.token_ids += delta.token_ids
        one.num_preemptions = delta.num_preemptions
        if delta.logprobs is not None:
            one.logprobs = _joined(one.logprobs, delta.logprobs)
            # From left to right, however the deltas were merged.
            one.cumulative_logprob = sum(delta.logprobs.chosen(), one.cumulative_logprob or 0.0)
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = _joined(
                self.output.prompt_logprobs, delta.prompt_logprobs
            )
        if delta.finish_reason is not None:
            one.finish_reason, one.stop_reason = delta.finish_reason, delta.stop_reason
            self.output.finished = all(o.finished for o in self.states)
            if self.output.finished:
                self.output.finished_at = time.monotonic()
        self.output.num_cached_tokens = delta.num_cached_tokens


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


def _joined(
    first: LogprobList[Position] | None, later: LogprobList[Position]
) -> LogprobList[Position]:
    """Return `first` with `later` appended; a copy of `later` if there is no `first`."""
    if first is None:
        return later.copy()
    first.extend(later)
    return first


def _merge(delta: Delta, later: Delta) -> None:
    """Merge later output into an unread delta."""
    delta.text += later.text
    delta.token_ids += later.token_ids
    if later.logprobs is not None:
        delta.logprobs = _joined(delta.logprobs, later.logprobs)
    if later.prompt_logprobs is not None:
        delta.prompt_logprobs = _joined(delta.prompt_logprobs, later.prompt_logprobs)
    delta.finish_reason, delta.stop_reason = later.finish_reason, later.stop_reason
    delta.num_cached_tokens = later.num_cached_tokens or delta.num_cached_tokens
    delta.error = later.error


def _drop_answer(output: EngineOutput) -> None:
    """Drop the token that the engine generates for a request that wants none."""
    output.token_ids, output.logprobs = [], None
    if output.finish_reason in ("stop", "length"):
        output.finish_reason, output.stop_reason = "length", None
