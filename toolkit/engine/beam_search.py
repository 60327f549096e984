"""Beam search over requests for one token each.

The rules are those of Transformers' `generate(num_beams=...)`: `num_beams` beams continue, ended
beams are ranked by log-probability over length to the power of `length_penalty`, and
`early_stopping` decides when to stop.

It runs in the front end. Every step sends complete beams again: the prefix cache holds the tokens
that are computed already, also those that several beams share."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from toolkit.engine.outputs import (
    CompletionOutput,
    LogprobList,
    PositionLogprobs,
    RequestOutput,
    pack_record,
)
from toolkit.errors import InvalidRequestError
from toolkit.sampling.params import BeamSearchParams, SamplingParams
from toolkit.sequence import SequenceSpec
from toolkit.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Beam:
    """An answer or the beginning of one."""

    token_ids: list[int]
    logprob: float  # sum over its tokens
    records: bytes  # log-probabilities of its tokens; empty if they are not wanted
    has_ended: bool = False  # its last token ends the answer


class BeamSearch:
    """Search over one prompt.

    While it is not `is_finished`, run a request for each of `prompts` with `step_params`, and pass
    the reported log-probabilities to `advance`."""

    def __init__(self, spec: SequenceSpec, params: BeamSearchParams, max_logprobs: int) -> None:
        """`spec`: of a request for `params.max_tokens` tokens of the prompt."""
        prompt_token_ids, eos_token_ids = spec.prompt_token_ids, spec.eos_token_ids
        params = msgspec.structs.replace(params, max_tokens=spec.max_tokens)
        ends = () if params.ignore_eos else eos_token_ids
        self._prompt = prompt_token_ids
        self._params = params
        self._ends = frozenset([*ends, *(params.stop_token_ids or ())])
        # Suffices if all continuing beams descend from the same beam.
        num_candidates = params.beam_width + len(self._ends)
        if num_candidates > max_logprobs:
            raise InvalidRequestError(
                f"beam_width plus the number of end tokens is {num_candidates}. "
                f"The maximum is {max_logprobs} (--max-logprobs)."
            )
        self.step_params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=max(num_candidates, params.logprobs or 0),
            detokenize=False,
            ignore_eos=True,
        )
        self._open = [Beam([], 0.0, b"")]
        self._done: list[tuple[float, Beam]] = []  # best ended beams with their scores, best first

    @property
    def is_finished(self) -> bool:
        return not self._open

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids of each open beam, including the prompt."""
        return [self._prompt + beam.token_ids for beam in self._open]

    def advance(self, reported: Sequence[PositionLogprobs]) -> None:
        """Extend the beams by the likeliest tokens after each of `prompts`."""
        params, width = self._params, self._params.beam_width
        candidates = [
            (beam.logprob + one.logprob, beam, token, position)
            for beam, position in zip(self._open, reported, strict=True)
            for token, one in position.items()
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        length = len(self._open[0].token_ids) + 1
        is_last = length == params.max_tokens
        self._open = []
        for rank, (logprob, beam, token, position) in enumerate(candidates):
            has_ended = token in self._ends
            if rank < width and (is_last or has_ended):
                ended = self._extend(beam, token, logprob, position)
                self._done.append((self._score(ended, length), ended))
            elif not (is_last or has_ended) and len(self._open) < width:
                self._open.append(self._extend(beam, token, logprob, position))
        self._done.sort(key=lambda scored: -scored[0])
        del self._done[width:]
        if self._open and len(self._done) == width and self._cannot_improve(length):
            self._open = []

    def _extend(self, beam: Beam, token: int, logprob: float, position: PositionLogprobs) -> Beam:
        records, wanted = beam.records, self._params.logprobs
        if wanted is not None:
            one = position[token]
            likeliest = itertools.islice(position.items(), wanted)
            pairs = [(token, one.logprob), *((id, other.logprob) for id, other in likeliest)]
            assert one.rank is not None, "reported positions have ranks"
            records += pack_record(one.rank, pairs)
        return Beam([*beam.token_ids, token], logprob, records, token in self._ends)

    def best(self, count: int, tokenizer: Tokenizer | None) -> list[CompletionOutput]:
        """Return the `count` best answers, best first. Their text excludes end tokens."""
        found = []
        for index, (_, beam) in enumerate(self._done[:count]):
            visible = beam.token_ids[:-1] if beam.has_ended else beam.token_ids
            output = CompletionOutput(
                index, tokenizer.decode(visible) if tokenizer is not None else ""
            )
            output.token_ids = beam.token_ids
            output.cumulative_logprob = beam.logprob
            if beam.records:
                size = len(beam.records) // len(beam.token_ids)
                output.logprobs = LogprobList(tokenizer, size, beam.records)
            output.finish_reason = "stop" if beam.has_ended else "length"
            found.append(output)
        return found

    def _cannot_improve(self, length: int) -> bool:
        """Return True if no open beam is expected to beat the worst ended beam."""
        params = self._params
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = params.max_tokens
        return self._score(self._open[0], length) <= self._done[-1][0]

    def _score(self, beam: Beam, length: int) -> float:
        return beam.logprob / float(length**self._params.length_penalty)


def first_logprobs(output: RequestOutput) -> PositionLogprobs:
    """Return the log-probabilities of a request for one token."""
    logprobs = output.outputs[0].logprobs
    assert logprobs, "step_params ask for log-probabilities"
    return logprobs[0]
