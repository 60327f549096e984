"""From the core's tokens to text: incremental detokenization, stop strings, log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

from toolkit.engine.messages import EngineOutput, EngineRequest, LogprobEntry
from toolkit.engine.outputs import CompletionOutput, Delta, Logprob, PositionLogprobs, RequestOutput
from toolkit.engine.tokenizer import TextStream, Tokenizer
from toolkit.sampling.params import SamplingParams


class SequenceState:
    """One answer on its way. Text that may be the beginning of a stop string is held back."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self._stream = None
        if tokenizer is not None and params.detokenize:
            self._stream = TextStream(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._params = params
        self._stops = params.stop_strings
        self._held = ""
        self._num_immune = 0
        """Characters held back that came before `min_tokens`: a stop string that ends among them ends nothing."""
        self._num_tokens = 0
        self.finished = False

    def add(self, token_ids: list[int], ended: bool) -> tuple[str, str | None]:
        """(text that is certain, the stop string that was met). `ended`: these are the last tokens."""
        if self._stream is None:
            return "", None
        self._num_tokens += len(token_ids)
        text = self._held + self._stream.add(token_ids)
        if ended:
            text += self._stream.end()
        if not self._stops:
            return text, None
        if self._num_tokens < self._params.min_tokens:
            self._num_immune = len(text)
        stop, at = self._first_stop(text)
        if stop is not None:
            self._held = ""
            return text[: at + (len(stop) if self._params.include_stop_str_in_output else 0)], stop
        keep = 0 if ended else max(_overlap(text, stop) for stop in self._stops)
        certain = len(text) - keep
        self._held = text[certain:]
        self._num_immune = max(0, self._num_immune - certain)
        return text[:certain], None

    def _first_stop(self, text: str) -> tuple[str | None, int]:
        """(the stop string that begins first, where) among those that end after what is immune."""
        ends_after = self._num_immune
        found = [(text.find(stop, max(0, ends_after - len(stop) + 1)), stop) for stop in self._stops]
        at, stop = min(((at, stop) for at, stop in found if at >= 0), default=(-1, None))
        return stop, at


@dataclass(slots=True)
class RequestState:
    """A request on its way, as the front end sees it."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    sequences: list[SequenceState]
    num_cached_tokens: int = 0
    num_finished: int = 0
    prompt_logprobs_begun: bool = False

    @property
    def finished(self) -> bool:
        return self.num_finished == len(self.sequences)

    @property
    def unfinished_sequences(self) -> list[str]:
        """Names of the sequences that the core still runs."""
        return [f"{self.id}/{i}" for i, sequence in enumerate(self.sequences) if not sequence.finished]


class OutputProcessor:
    """Knows every request under way."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.requests: dict[str, RequestState] = {}

    def add(self, request: EngineRequest, prompt: str | None) -> RequestState:
        sequences = [SequenceState(self.tokenizer, request.params) for _ in range(request.params.n)]
        state = RequestState(request.id, prompt, request.prompt_token_ids, request.params, sequences)
        self.requests[request.id] = state
        return state

    def remove(self, request_id: str) -> RequestState | None:
        return self.requests.pop(request_id, None)

    def process(self, output: EngineOutput) -> tuple[RequestState, Delta, bool] | None:
        """(request, what is new, whether the core must be told to end the sequence); None for one that has
        ended here.
        """
        state = self.requests.get(output.id)
        if state is None or state.sequences[output.index].finished:
            return None
        sequence = state.sequences[output.index]
        if output.index == 0:  # its siblings find the blocks that it has just computed
            state.num_cached_tokens = output.num_cached_tokens or state.num_cached_tokens
        text, stop = sequence.add(self._visible(output, state.params), output.finish_reason is not None)
        delta = Delta(
            index=output.index,
            text=text,
            token_ids=output.token_ids,
            finish_reason="stop" if stop is not None else output.finish_reason,
            stop_reason=stop if stop is not None else output.stop_reason,
            num_cached_tokens=state.num_cached_tokens,
            error=output.error,
        )
        if output.logprobs is not None:
            delta.logprobs = [self._position(output.logprobs)]
        if output.prompt_logprobs is not None:
            delta.prompt_logprobs = [self._position(entry) for entry in output.prompt_logprobs]
        if state.params.prompt_logprobs is not None and not state.prompt_logprobs_begun:
            state.prompt_logprobs_begun = True
            delta.prompt_logprobs = [None, *(delta.prompt_logprobs or [])]  # nothing comes before the first
        if delta.finish_reason is not None:
            sequence.finished = True
            state.num_finished += 1
            if state.finished:
                del self.requests[state.id]
        return state, delta, stop is not None and output.finish_reason is None

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
            self.output.prompt_logprobs = (self.output.prompt_logprobs or []) + delta.prompt_logprobs
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
