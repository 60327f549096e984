"""Results of a step: append its tokens to the requests, and end those that are done."""

from collections.abc import Callable
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from toolkit.scheduler.output import IntArray, ModelOutput, PromptLogprobs, SchedulerOutput
from toolkit.scheduler.request import FinishReason, Request
from toolkit.scheduler.rows import Rows
from toolkit.scheduler.stats import StatsRecorder
from toolkit.scheduler.step import BoolArray, RowArray, StepInFlight, StepResult, StepResults


class TokenAppender:
    """Appends the tokens of steps to requests, and ends requests with their last token.

    In steady decode this is NumPy over rows. Python runs for requests that end, report more than a
    token, or have left their row since."""

    def __init__(
        self, rows: Rows, stats: StatsRecorder, finish: Callable[[Request, FinishReason], None]
    ) -> None:
        """`finish`: end a request for a reason."""
        self._rows = rows
        self._stats = stats
        self._finish = finish

    def append(
        self, step: StepInFlight, which: RowArray, output: SchedulerOutput, result: ModelOutput
    ) -> StepResults:
        """Append the tokens of the requests that sampled: `which`, as indices into the step.

        Return them with new log-probabilities of prompts."""
        if not result.prompt_logprobs:
            return self._append_all(step, which, output, result)
        others = self._new_prompt_logprobs(step, result)
        results = self._append_all(step, which, output, result)
        results.others = others + results.others
        return results

    def _append_all(
        self, step: StepInFlight, which: RowArray, output: SchedulerOutput, result: ModelOutput
    ) -> StepResults:
        """Append the tokens of the requests that sampled: `which`, as indices into the step."""
        rows, drafts = step.rows.take(which), result.drafts
        is_current = step.num_rows_released == self._rows.num_released
        if result.counts is None and drafts is None and is_current:
            return self._append_ones(step, which, rows, result)
        table, others, token_ids = self._rows, list[StepResult](), result.token_ids
        num_sampled = output.num_sampled
        counts = num_sampled if result.counts is None else result.counts
        firsts = (counts.cumsum() - counts).astype(np.int64)
        if not is_current:
            stays = table.taken_at.take(rows) <= output.step
            for at in np.flatnonzero(~stays).tolist():
                late, first, count = step.requests[which.item(at)], firsts.item(at), counts.item(at)
                late.reject(num_sampled.item(at) - count)
                others += self._append_late(late, first, token_ids[first : first + count], result)
            which, rows, firsts = which[stays], rows[stays], firsts[stays]
            num_sampled, counts = num_sampled[stays], counts[stays]
            drafts = None if drafts is None else drafts[stays]
        if drafts is not None:
            table.offer(rows, drafts)
            self._count_drafts(num_sampled - 1, counts - 1)
        kept, single = table.append(rows, token_ids, firsts, num_sampled, counts)
        single |= table.needs_own_output.take(rows)
        silent = single | table.is_final_only.take(rows)
        results = self._results(rows, token_ids, firsts, counts, ~silent)
        results.others = others
        for at in np.flatnonzero(single).tolist() if np.count_nonzero(single) else ():
            request, first = step.requests[which.item(at)], firsts.item(at)
            tokens = token_ids[first : first + kept.item(at)].tolist()
            if not request.spec.is_final_only:
                earlier = enumerate(tokens[:-1], first)
                others += [
                    StepResult(request, token, sample, is_newest=False) for sample, token in earlier
                ]
            others.append(self._result_of(request, tokens[-1], first + len(tokens) - 1, result))
        return results

    def _append_ones(
        self, step: StepInFlight, which: RowArray, rows: RowArray, result: ModelOutput
    ) -> StepResults:
        """Append one token to each of the rows: `_append_all` for steps without drafts."""
        table, token_ids, samples = self._rows, result.token_ids, np.arange(len(which))
        single = table.append_ones(rows, token_ids)
        single |= table.needs_own_output.take(rows)
        silent = single | table.is_final_only.take(rows)
        clients, numbers = table.clients.take(rows), table.numbers.take(rows)
        if not np.count_nonzero(silent):
            return StepResults(clients, numbers, token_ids, [], samples)
        plain, others = ~silent, list[StepResult]()
        for at in np.flatnonzero(single).tolist():
            request = step.requests[which.item(at)]
            others.append(self._result_of(request, token_ids.item(at), at, result))
        return StepResults(clients[plain], numbers[plain], token_ids[plain], others, samples[plain])

    def _count_drafts(self, num_drafts: IntArray, num_accepted: IntArray) -> None:
        """Add a step's drafts to the statistics."""
        stats = self._stats.current
        if not np.count_nonzero(num_drafts):
            return
        stats.spec_decode_num_drafts += int(np.count_nonzero(num_drafts))
        stats.spec_decode_num_draft_tokens += int(num_drafts.sum())
        stats.spec_decode_num_accepted_tokens += int(num_accepted.sum())
        places = np.arange(num_drafts.max())
        counts = np.count_nonzero(num_accepted[:, None] > places, axis=0).tolist()
        both = zip_longest(stats.accepted_per_position, counts, fillvalue=0)
        stats.accepted_per_position = [before + now for before, now in both]

    def _results(
        self,
        rows: RowArray,
        token_ids: IntArray,
        firsts: npt.NDArray[np.int64],
        counts: IntArray,
        plain: BoolArray,
    ) -> StepResults:
        """Return the results of the plain rows, one for each token."""
        if np.count_nonzero(plain) < len(rows):
            rows, firsts, counts = rows[plain], firsts[plain], counts[plain]
        clients, numbers = self._rows.clients.take(rows), self._rows.numbers.take(rows)
        if len(token_ids) == len(rows):
            return StepResults(clients, numbers, token_ids, [], firsts)
        samples = np.arange(counts.sum()) + np.repeat(firsts - (counts.cumsum() - counts), counts)
        clients, numbers = np.repeat(clients, counts), np.repeat(numbers, counts)
        return StepResults(clients, numbers, token_ids.take(samples), [], samples)

    def _append_late(
        self, request: Request, first: int, token_ids: IntArray, result: ModelOutput
    ) -> list[StepResult]:
        """Append tokens of a request that has left its row since."""
        results: list[StepResult] = []
        for sample, token_id in enumerate(token_ids.tolist(), first):
            if request.is_finished:
                break
            request.append(token_id)
            results.append(self._result_of(request, token_id, sample, result))
        for earlier in results[:-1]:
            earlier.is_newest = False
        return results[-1:] * request.is_finished if request.spec.is_final_only else results

    def _result_of(
        self, request: Request, token_id: int, sample: int, result: ModelOutput
    ) -> StepResult:
        """Return a request's result with its newest token. Ends the request if it is done."""
        if token_id < 0:
            request.drop_last()
            reason, error = _no_token_reason(request, result.failures.get(sample))
            self._finish(request, reason)
            return StepResult(request, error=error)
        if request.num_known_tokens >= request.stops_from and token_id in request.ending_token_ids:
            request.stop_reason = token_id if token_id in request.stop_token_ids else None
            self._finish(request, FinishReason.STOP)
        elif request.num_known_tokens >= request.length_limit(self._rows.max_model_len):
            self._finish(request, FinishReason.LENGTH)
        elif request.row >= 0:
            self._rows.needs_own_output[request.row] = request.needs_own_output
        return StepResult(request, token_id, sample)

    def _new_prompt_logprobs(self, step: StepInFlight, result: ModelOutput) -> list[StepResult]:
        """Return the prompt positions of this step that were not reported before a preemption."""
        results = []
        for index, found in result.prompt_logprobs.items():
            request, records = step.requests[index], found.records
            skip = request.num_prompt_logprobs + 1 - found.start
            if request.is_finished or skip >= len(records):
                continue
            skip = max(skip, 0)
            request.num_prompt_logprobs += len(records) - skip
            prompt_logprobs = PromptLogprobs(found.start + skip, records[skip:])
            results.append(StepResult(request, prompt_logprobs=prompt_logprobs))
        return results


def _no_token_reason(request: Request, failure: str | None) -> tuple[FinishReason, str]:
    """Return why a request found no token to sample. `failure`: of its logits processor."""
    if failure is not None:
        return FinishReason.ERROR, failure
    params = request.params
    bound = params.allowed_token_ids or params.bad_words_token_ids or params.logit_bias
    if request.grammar is not None and bound:
        return FinishReason.INVALID, (
            "no token is allowed by both the structured output and allowed_token_ids, bad_words or "
            "logit_bias; relax one of them"
        )
    nonsense = "the model's logits are not finite (NaN or infinity)"
    if params.extra_args:
        names = ", ".join(params.extra_args)
        return FinishReason.ERROR, (
            f"the logits processors that read {names} leave no token, or {nonsense}"
        )
    if params.allowed_token_ids or params.bad_words_token_ids:
        return FinishReason.ERROR, f"allowed_token_ids and bad_words leave no token, or {nonsense}"
    return FinishReason.ERROR, nonsense
