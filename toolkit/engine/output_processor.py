"""From the core's tokens to text: incremental detokenization, stop strings, log-probabilities."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from toolkit.engine.messages import EngineOutput, EngineOutputs, EngineRequest, LogprobEntry
from toolkit.engine.outputs import CompletionOutput, Delta, Logprob, PositionLogprobs, RequestOutput
from toolkit.sampling.params import SamplingParams
from toolkit.text.tokenizer import SpacedTextStream, TextStream, Tokenizer


class AnswerText:
    """The text of one answer on its way. What may be the beginning of a stop string is held back."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        if params.spaces_between_special_tokens and not params.skip_special_tokens:
            self.stream: TextStream = SpacedTextStream(tokenizer)
        else:
            self.stream = TextStream(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._min_tokens = params.min_tokens
        self._stops = params.stop_strings
        self._heads = frozenset(stop[0] for stop in self._stops)
        self._include_stop = params.include_stop_str_in_output
        self._held = ""
        self._num_immune = 0
        """Characters held back that came before `min_tokens`: a stop string that ends among them ends nothing."""
        self._num_tokens = 0

    def add(self, token_ids: list[int], ended: bool) -> tuple[str, str | None]:
        """(text that is certain, the stop string that was met). `ended`: these are the last tokens."""
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
        """(the stop string that begins first, where) among those that end after what is immune."""
        ends_after = self._num_immune
        found = [
            (text.find(stop, max(0, ends_after - len(stop) + 1)), stop) for stop in self._stops
        ]
        at, stop = min(((at, stop) for at, stop in found if at >= 0), default=(-1, None))
        return stop, at


@dataclass(slots=True, eq=False)
class SequenceState:
    """One of a request's answers, as the front end sees it. Moments are on the monotonic clock."""

    request: RequestState
    index: int
    number: int
    text: AnswerText | None
    """None when no text is wanted."""
    stream: TextStream | None
    """Where plain tokens go: the text's, unless stop strings have to be found."""
    delta: Delta | None = None
    """What is new and nobody has taken yet."""
    finished: bool = False
    token_ids: list[int] = field(default_factory=list)
    """All that have come: should the core die, another goes on after them."""
    first_token: float = 0.0
    last_token: float = 0.0
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def put(self, delta: Delta) -> None:
        """Adds to what is new, and wakes who waits for it."""
        if self.delta is not None:
            _merge(self.delta, delta)
            return
        self.delta = delta
        self.request.news.append(self)
        self.request.wake()

    def end(self, reason: str) -> None:
        """Ends it from this side."""
        self.finished = True
        self.put(Delta(self.index, "", [], finish_reason=reason))


@dataclass(slots=True, eq=False)
class RequestState:
    """A request on its way, as the front end sees it."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    sequences: list[SequenceState] = field(default_factory=list)
    wake: Callable[[], None] = lambda: None
    """Called when there is news of a sequence that had none."""
    news: deque[SequenceState] = field(default_factory=deque)
    """Those with a delta, in the order in which they got it."""
    num_cached_tokens: int = 0
    num_finished: int = 0
    prompt_logprobs_begun: bool = False
    num_prompt_logprobs: int = 0
    """Prompt positions that have been reported."""

    @property
    def finished(self) -> bool:
        return self.num_finished == len(self.sequences)

    @property
    def unfinished_numbers(self) -> list[int]:
        """Sequences that the core still runs."""
        return [sequence.number for sequence in self.sequences if not sequence.finished]

    def take(self) -> Delta | None:
        """What is new of the sequence that has waited longest; None when nothing is."""
        if not self.news:
            return None
        sequence = self.news.popleft()
        delta, sequence.delta = sequence.delta, None
        return delta


@dataclass(slots=True)
class Processed:
    """What a step's message was."""

    ended: list[int] = field(default_factory=list)
    """Sequences that met a stop string, and go on in the core until it is told."""
    gaps: dict[float, int] = field(default_factory=dict)
    """For moments at which sequences had got their last token before: how many have a new one now."""
    begun: list[SequenceState] = field(default_factory=list)
    """Those whose first token came."""
    finished: list[tuple[SequenceState, str]] = field(default_factory=list)
    """Those that ended, and why."""


class OutputProcessor:
    """Knows every request under way."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.requests: dict[str, RequestState] = {}
        self._sequences: dict[int, SequenceState] = {}
        self._next_number = 0

    def add(self, request: EngineRequest, prompt: str | None) -> RequestState:
        """Takes a request in and numbers its sequences."""
        params = request.spec.params
        state = RequestState(request.id, prompt, request.spec.prompt_token_ids, params)
        request.number = self._next_number
        self._next_number += params.n
        for index in range(params.n):
            text = (
                AnswerText(self.tokenizer, params) if self.tokenizer and params.detokenize else None
            )
            stream = text.stream if text is not None and not params.stop_strings else None
            sequence = SequenceState(state, index, request.number + index, text, stream)
            state.sequences.append(sequence)
            self._sequences[sequence.number] = sequence
        self.requests[request.id] = state
        return state

    def find(self, number: int) -> SequenceState | None:
        """The sequence with that number, unless it has ended."""
        return self._sequences.get(number)

    def remove(self, request_id: str) -> RequestState | None:
        """Forgets a request; what still comes of it is dropped."""
        state = self.requests.pop(request_id, None)
        if state is not None:
            for sequence in state.sequences:
                self._sequences.pop(sequence.number, None)
        return state

    def process(self, message: EngineOutputs, now: float) -> Processed:
        """Turns a step's tokens into deltas of the requests. `now`: when the message came."""
        done = Processed()
        for output in message.outputs:
            sequence = self._sequences.get(output.number)
            if sequence is not None:
                self._process_one(sequence, output, now, done)
        if message.numbers:
            self._process_columns(message, now, done)
        return done

    def _process_columns(self, message: EngineOutputs, now: float, done: Processed) -> None:
        """The one loop over every token of a busy server: as little as can be for each."""
        numbers = np.frombuffer(message.numbers, np.int64).tolist()
        tokens = np.frombuffer(message.token_ids, np.int32).tolist()
        find, gaps = self._sequences.get, done.gaps
        for number, token in zip(numbers, tokens, strict=True):
            sequence = find(number)
            if sequence is None:
                continue
            last = sequence.last_token
            gaps[last] = gaps.get(last, 0) + 1
            sequence.last_token = now
            sequence.token_ids.append(token)
            if sequence.stream is not None:
                text = sequence.stream.add_one(token)
            elif sequence.text is None:
                text = ""
            else:
                text, stop = sequence.text.add([token], False)
                if stop is not None:
                    self._stop(sequence, Delta(sequence.index, text, [token]), stop, done)
                    continue
            delta = sequence.delta
            if delta is None:
                request = sequence.request
                sequence.delta = Delta(
                    sequence.index, text, [token], num_cached_tokens=request.num_cached_tokens
                )
                request.news.append(sequence)
                request.wake()
            else:
                delta.text += text
                delta.token_ids.append(token)

    def _process_one(
        self, sequence: SequenceState, output: EngineOutput, now: float, done: Processed
    ) -> None:
        state = sequence.request
        if sequence.index == 0:  # its siblings find the blocks that it has just computed
            state.num_cached_tokens = output.num_cached_tokens or state.num_cached_tokens
        if output.token_ids:
            if sequence.num_tokens:
                done.gaps[sequence.last_token] = done.gaps.get(sequence.last_token, 0) + 1
            else:
                sequence.first_token = now
                done.begun.append(sequence)
            sequence.last_token = now
            sequence.token_ids += output.token_ids
        sequence.num_preemptions = output.num_preemptions
        text, stop = "", None
        if sequence.text is not None:
            visible = self._visible(output, state.params)
            text, stop = sequence.text.add(visible, output.finish_reason is not None)
        delta = Delta(
            sequence.index, text, output.token_ids, num_cached_tokens=state.num_cached_tokens
        )
        delta.error, delta.embedding = output.error, output.embedding
        if output.logprobs is not None:
            delta.logprobs = [self._position(output.logprobs)]
        if output.prompt_logprobs is not None:
            state.num_prompt_logprobs += len(output.prompt_logprobs)
            delta.prompt_logprobs = [self._position(entry) for entry in output.prompt_logprobs]
        if state.params.prompt_logprobs is not None and not state.prompt_logprobs_begun:
            state.prompt_logprobs_begun = True
            delta.prompt_logprobs = [
                None,
                *(delta.prompt_logprobs or []),
            ]  # nothing comes before the first
        if stop is not None:
            self._stop(sequence, delta, stop, done, in_core=output.finish_reason is None)
        elif output.finish_reason is not None:
            self._finish(sequence, delta, output.finish_reason, output.stop_reason, done)
        else:
            sequence.put(delta)

    def _stop(
        self,
        sequence: SequenceState,
        delta: Delta,
        stop: str,
        done: Processed,
        *,
        in_core: bool = True,
    ) -> None:
        if in_core:
            done.ended.append(sequence.number)
        self._finish(sequence, delta, "stop", stop, done)

    def _finish(
        self,
        sequence: SequenceState,
        delta: Delta,
        reason: str,
        stop_reason: int | str | None,
        done: Processed,
    ) -> None:
        delta.finish_reason, delta.stop_reason = reason, stop_reason
        done.finished.append((sequence, reason))
        sequence.finished = True
        state = sequence.request
        state.num_finished += 1
        del self._sequences[sequence.number]
        if state.finished:
            del self.requests[state.id]
        sequence.put(delta)

    def _visible(self, output: EngineOutput, params: SamplingParams) -> list[int]:
        """The tokens that make text: not the one that ended the answer, unless the user asked to see it."""
        ended_by_token = output.finish_reason == "stop" and output.token_ids
        if ended_by_token and not params.include_stop_str_in_output:
            return output.token_ids[:-1]
        return output.token_ids

    def _position(self, entry: LogprobEntry) -> PositionLogprobs:
        position: PositionLogprobs = {}
        for i, (token, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
            if token not in position:
                rank = entry.rank if i == 0 else i
                text = self.tokenizer.token_text(token) if self.tokenizer is not None else ""
                position[token] = Logprob(logprob, rank, text)
        return position


@dataclass(slots=True)
class Collected:
    """Deltas gathered into a RequestOutput."""

    output: RequestOutput
    states: list[CompletionOutput] = field(default_factory=list)

    @classmethod
    def of(cls, state: RequestState) -> Collected:
        outputs = [CompletionOutput(index=i) for i in range(len(state.sequences))]
        return cls(RequestOutput(state.id, state.prompt, state.prompt_token_ids, outputs), outputs)

    def add(self, delta: Delta) -> None:
        one = self.states[delta.index]
        one.text += delta.text
        one.token_ids += delta.token_ids
        if delta.logprobs is not None:
            one.logprobs = (one.logprobs or []) + delta.logprobs
            chosen = (next(iter(position.values())).logprob for position in delta.logprobs)
            one.cumulative_logprob = (one.cumulative_logprob or 0.0) + sum(chosen)
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = (
                self.output.prompt_logprobs or []
            ) + delta.prompt_logprobs
        if delta.finish_reason is not None:
            one.finish_reason, one.stop_reason = delta.finish_reason, delta.stop_reason
            self.output.finished = all(o.finished for o in self.states)
        self.output.num_cached_tokens = delta.num_cached_tokens


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


def _merge(delta: Delta, later: Delta) -> None:
    """Adds what came later to a delta that nobody has taken yet."""
    delta.text += later.text
    delta.token_ids += later.token_ids
    if later.logprobs is not None:
        delta.logprobs = (delta.logprobs or []) + later.logprobs
    if later.prompt_logprobs is not None:
        delta.prompt_logprobs = (delta.prompt_logprobs or []) + later.prompt_logprobs
    delta.finish_reason, delta.stop_reason = later.finish_reason, later.stop_reason
    delta.num_cached_tokens = later.num_cached_tokens or delta.num_cached_tokens
    delta.error = later.error
