"""The engine's loop: schedule, execute, update."""

import logging
import random
import time
from collections import deque
from collections.abc import Callable
from typing import assert_never

import msgspec
import numpy as np

from toolkit.config import EngineConfig
from toolkit.config.sources import checks_memory
from toolkit.engine.adapter_loads import AdapterLoads
from toolkit.engine.constraints import Constraints
from toolkit.engine.features import Features
from toolkit.engine.messages import (
    Abort,
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    LogprobRecords,
    NeedFeature,
    Operate,
    OperationResult,
    RequestInfo,
)
from toolkit.engine.pace import Pace
from toolkit.engine.request_list import describe, has_id
from toolkit.errors import WorkersLostError
from toolkit.executor import Executor, Pending
from toolkit.hardware.memory import is_fatal, is_out_of_memory
from toolkit.sampling.grammar import Masks
from toolkit.sampling.params import answer_seed
from toolkit.scheduler import (
    FinishReason,
    ModelOutput,
    Request,
    Scheduler,
    SchedulerOutput,
    StepResult,
    StepResults,
)
from toolkit.scheduler.output import Encode, IntArray, record_length
from toolkit.scheduler.stats import EngineStats
from toolkit.text.tokenizer import Tokenizer
from toolkit.worker.operations import LoadAdapter, UnloadAdapter

logger = logging.getLogger(__name__)

ENCODED_SHARE = 5 / 8
"""Rows of pictures that one step computes, for each token that it may have; or one picture.

A step with as many takes no longer than one with the most tokens: a row costs half as much."""


class EngineCore:
    """Runs requests. Not thread-safe: one caller adds, aborts and steps."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        read_tokenizer: Callable[[], Tokenizer | None] = lambda: None,
    ) -> None:
        """`read_tokenizer` is called once, in a thread, for the first request with a grammar."""
        self.info = info = executor.info
        self.executor = executor
        self.scheduler = Scheduler(
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            groups=info.groups,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            policy=config.scheduler.scheduling_policy,
            num_host_blocks=info.num_host_blocks,
            enable_prefix_caching=config.cache.enable_prefix_caching and info.chunks_prompts,
            num_state_slots=info.num_state_slots,
            num_host_slots=info.num_host_slots,
            chunks_prompts=info.chunks_prompts,
            num_stages=config.parallel.pipeline_parallel_size,
            max_loras=config.lora.max_loras,
            most_drafts=info.most_drafts,
            most_step_drafts=info.most_step_drafts,
            step_times=info.step_times,
            num_feature_pages=info.num_feature_pages,
            most_encoded=int(info.max_num_batched_tokens * ENCODED_SHARE),
        )
        in_memory = config.lora.num_in_memory
        self._adapters = AdapterLoads(executor.operate, in_memory, info.adapters[:in_memory])
        self.features = Features()
        self.scheduler.needs.has_bytes = self.features.require
        self._told_adapters: dict[str, tuple[int, int]] = {}  # in the last statistics with any
        self._random = random.Random(config.model.seed)
        num_stages = config.parallel.pipeline_parallel_size
        self._depth = num_stages if num_stages > 1 else 1 + info.async_scheduling
        self._has_all_tokens = num_stages > 1
        """True if all earlier tokens of a step's requests are known when it is launched."""
        is_remote = config.parallel.distributed_executor_backend == "ray"
        self._overlaps = self._depth > 1 and (info.device != "cpu" or is_remote)
        self._pace = Pace() if self._overlaps and num_stages == 1 else None
        self._steps: deque[tuple[SchedulerOutput, Pending]] = deque()
        self._constraints = Constraints(read_tokenizer, info.vocab_size)
        self._clients = [0]
        self._checks_memory = checks_memory()
        self.failure: str | None = None
        """Reason why the latest step failed or produced no token; None if it succeeded."""
        self._scheduled: list[Request] = []
        self._scheduled_at = 0.0

    @property
    def has_work(self) -> bool:
        return bool(
            self.scheduler.num_unfinished
            or self._steps
            or self._adapters.has_work
            or self.scheduler.ended_with_needs
        )

    @property
    def is_running(self) -> bool:
        """True if a request has a row, so that the next step has work."""
        return bool(self.scheduler.running or self._steps)

    @property
    def spare_seconds(self) -> float:
        """Seconds for which the next step can wait for requests: the device is busy as long.

        0 while pictures are computed: to launch the next step, with their prompts, takes longer
        than others."""
        if self._pace is None or len(self._steps) != 1 or self._steps[0][0].loads:
            return 0.0
        return self._pace.spare_seconds()

    @property
    def overlaps(self) -> bool:
        """True if results are processed while the device runs the next step."""
        return self._overlaps

    def add(self, new: EngineRequest) -> None:
        """Add n sequences that share the prompt's blocks. Raises ValueError if the cache is too
        small."""
        if new.client not in self._clients:
            self._clients.append(new.client)
        leader: Request | None = None
        indices = range(new.spec.params.n) if new.index is None else (new.index,)
        for number, index in enumerate(indices, start=new.number):
            request = self._make_request(new, index, number, leader)
            self.scheduler.add(request, is_queued=False)
            if new.spec.grammar:
                self._constraints.add(request)
            else:
                self._queue(request)
            leader = leader or request

    def operate(self, asked: Operate) -> None:
        """Start an operation. `pop_messages` returns the answer."""
        match asked.operation:
            case LoadAdapter() | UnloadAdapter():
                self._adapters.operate(asked)
            case unknown:
                assert_never(unknown)

    def pop_messages(self) -> list[tuple[int, OperationResult | NeedFeature]]:
        """Return answers to operations, and what requests lack, with the clients to send it to."""
        return [*self._adapters.pop_results(), *self.features.pop_asks()]

    def abort(self, abort: Abort) -> None:
        """End sequences. Unknown numbers have ended already."""
        for number in abort.numbers:
            self.scheduler.abort(_sequence_id(abort.client, number))

    def remove_client(self, client: int) -> int:
        """End all sequences of a client that has exited. Returns their number."""
        if client in self._clients:
            self._clients.remove(client)
        ended = self.scheduler.abort_client(client)
        self.features.forget_client(client)
        return ended

    def live_requests(self) -> list[RequestInfo]:
        """Return all unfinished requests in order of arrival."""
        return describe(self.scheduler.requests, time.monotonic())

    def end_requests(self, id: str) -> tuple[list[RequestInfo], dict[int, EngineOutputs]]:
        """End the requests with this id. Returns (their descriptions, messages to clients)."""
        ending = [request for request in self.scheduler.requests if has_id(request, id)]
        messages: dict[int, EngineOutputs] = {}
        described = describe(ending, time.monotonic())
        for request in ending:
            self.scheduler.abort(request.id)
            output = EngineOutput(request.number, [], finish_reason=FinishReason.ABORT.value)
            messages.setdefault(request.client, EngineOutputs()).outputs.append(output)
        return described, messages

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()

    def step(self) -> dict[int, EngineOutputs]:
        """Launch steps and collect the oldest. Returns a message for each client."""
        self.launch()
        return self.collect()

    def launch(self) -> None:
        """Launch steps up to the depth of the overlap."""
        while self.scheduler.ended_with_needs:
            ended = self.scheduler.ended_with_needs.pop()
            self._adapters.leave(ended)
            self.features.leave(ended)
        for request in self._constraints.pop_compiled():
            self._queue(request)
        for request in self.features.pop_ready():
            self._require_adapter(request)
        for request in self._adapters.pop_ready():
            self.scheduler.enqueue(request)
        while len(self._steps) < self._depth:
            now = time.monotonic()
            step = self.scheduler.schedule()
            if step is None:
                break
            if step.new_rows:
                started_requests = self.scheduler.first_scheduled(step)
                for request in started_requests:
                    request.first_run_at = now
                self._scheduled += started_requests
                self._scheduled_at = now
            self._steps.append((step, self._launch(step)))
            if len(self._steps) == 1:
                self._begin(step)
            if len(self._steps) == 1 or self._has_all_tokens:
                self._set_masks(len(self._steps) - 1)

    def collect(self) -> dict[int, EngineOutputs]:
        """Wait for the oldest step. Returns a message for each client, and always for client 0."""
        if not self._steps:
            self._constraints.wait()
            if self._adapters.has_work:
                self.executor.check_health()  # a lost rank never ends what it reads
                self._adapters.wait()
            return self._messages(self._end_failed())
        step, pending = self._steps.popleft()
        try:
            result = pending.result()
        except Exception as error:
            return self._messages(self._recover(step, error))
        for load in step.loads:
            if isinstance(load, Encode):
                self.features.drop(load.digest)
        if self._pace is not None:
            self._pace.end()
        if self._steps:
            self._begin(self._steps[0][0])
        results = self.scheduler.update(step, result)
        if self._steps and not self._has_all_tokens:
            self._set_masks(0)
        outputs = self._end_failed()
        num_sampled = int(np.count_nonzero(result.token_ids >= 0))
        if num_sampled or not len(result.token_ids):
            self.failure = None
        for step_result in results.others:
            outputs.setdefault(step_result.request.client, []).append(
                _to_output(step_result, result)
            )
            if (
                step_result.error is not None
                and not num_sampled
                and not step_result.request.excludes_tokens
            ):
                self.failure = step_result.error
        if self._checks_memory and not self._steps:
            self.scheduler.check()
        return self._messages(outputs, results, result.logprobs, step, num_sampled)

    def drop_steps(self) -> None:
        """Drop the steps in flight. Their tokens are computed again."""
        self._steps.clear()
        self.scheduler.drop_steps_in_flight()

    def shutdown(self) -> None:
        self._steps.clear()
        self.executor.shutdown()

    def _make_request(
        self, new: EngineRequest, index: int, number: int, leader: Request | None
    ) -> Request:
        spec = new.spec
        seed = spec.params.seed if new.seed is None else new.seed
        if seed is None:
            seed = self._random.getrandbits(63)
        else:
            seed = answer_seed(seed, index)
        # A prompt that is pooled computes all of its tokens, but may share a clip.
        is_found = spec.pooling is None or bool(spec.features)
        caches = self.scheduler.enable_prefix_caching and is_found
        request = Request(
            id=_sequence_id(new.client, number),
            spec=spec,
            seed=seed,
            # Without prefix caching only siblings share blocks, through a salt of their own.
            cache_salt=spec.cache_key if caches else f"only {new.id}",
            cacheable=caches or spec.params.n > 1,
            leader=leader,
            client=new.client,
            number=number,
            name=new.id,
            origin=new.origin,
            arrived_at=new.arrival,
        )
        # The first sequence reports the prompt's log-probabilities for all of them.
        request.num_prompt_logprobs = spec.num_prompt_tokens if index else new.num_prompt_logprobs
        if new.output_token_ids:
            request.resume(new.output_token_ids)
        return request

    def _queue(self, request: Request) -> None:
        """Queue a request whose grammar is compiled. What it needs besides comes first."""
        if request.spec.features:
            self.features.add(request, self.scheduler.lacking(request))
        else:
            self._require_adapter(request)

    def _require_adapter(self, request: Request) -> None:
        """Queue a request, or have its adapter read first."""
        if request.spec.adapter is None:
            self.scheduler.enqueue(request)
        else:
            self._adapters.add(request)

    def _launch(self, step: SchedulerOutput) -> Pending:
        for index, load in enumerate(step.loads):
            if isinstance(load, Encode):
                data = self.features.data[load.digest]
                step.loads[index] = msgspec.structs.replace(load, data=data)
        try:
            return self.executor.execute(step)
        except Exception as error:
            return _FailedStep(error)

    def _begin(self, step: SchedulerOutput) -> None:
        """Note that the device begins a step."""
        if self._pace is not None:
            self._pace.begin(step.total_tokens, len(step.rows))

    def _set_masks(self, index: int) -> None:
        """Send the grammar masks of a step, whose earlier tokens are all known now.

        The device computes meanwhile. The next step is not launched yet."""
        step, pending = self._steps[index]
        if not len(step.constrained):
            return
        try:
            pending.constrain(self._constraints.masks(self.scheduler.constrained(step)))
        except Exception as error:
            self._steps[index] = (step, _FailedStep(error))

    def _end_failed(self) -> dict[int, list[EngineOutput]]:
        """End the requests whose grammar, feature or adapter failed."""
        outputs: dict[int, list[EngineOutput]] = {}
        failed = [(*one, FinishReason.INVALID, False) for one in self._constraints.pop_failed()]
        failed += [(*one, FinishReason.ERROR, False) for one in self.features.pop_failed()]
        failed += [(*one, FinishReason.INVALID, True) for one in self._adapters.pop_failed()]
        for request, failure, reason, is_adapter in failed:
            self.scheduler.abort(request.id)
            output = EngineOutput(
                request.number,
                [],
                finish_reason=reason.value,
                error=failure,
                adapter_failed=is_adapter,
            )
            outputs.setdefault(request.client, []).append(output)
        return outputs

    def _recover(self, step: SchedulerOutput, error: Exception) -> dict[int, list[EngineOutput]]:
        """Recover from a failed step: give up some of its requests and recompute the others.

        Raises the error if no step can run any more."""
        if is_fatal(error) or isinstance(error, WorkersLostError):
            raise error
        self.failure = f"{type(error).__name__}: {error}"
        out_of_memory = is_out_of_memory(error)
        logger.error(
            "a step of %d tokens for %d requests failed%s",
            step.total_tokens,
            len(step.rows),
            ": out of memory" if out_of_memory else "",
            exc_info=None if out_of_memory else error,
        )
        self._steps.clear()
        given_up = self.scheduler.recover(step, out_of_memory=out_of_memory)
        if out_of_memory:
            logger.warning(
                "steps are now limited to %d tokens and %d requests. To avoid this, lower "
                "--max-num-batched-tokens, --max-num-seqs or --gpu-memory-utilization: %s",
                self.scheduler.max_num_batched_tokens,
                self.scheduler.max_num_seqs,
                str(error),
            )
        message = (
            f"out of memory in a step of {step.total_tokens} tokens ({error}); "
            f"lower --gpu-memory-utilization or --kv-cache-memory"
            if out_of_memory
            else f"the step failed: {self.failure}"
        )
        outputs: dict[int, list[EngineOutput]] = {}
        for request in given_up:
            failed = EngineOutput(
                request.number, [], finish_reason=FinishReason.ERROR.value, error=message
            )
            outputs.setdefault(request.client, []).append(failed)
        return outputs

    def _messages(
        self,
        outputs: dict[int, list[EngineOutput]],
        results: StepResults | None = None,
        logprobs: IntArray | None = None,
        step: SchedulerOutput | None = None,
        num_sampled: int = 0,
    ) -> dict[int, EngineOutputs]:
        messages = {client: EngineOutputs(items) for client, items in outputs.items()}
        first = messages.setdefault(0, EngineOutputs())
        first.stats = self.stats(step, num_sampled)
        if results is not None and len(results.numbers):
            self._add_columns(messages, results, logprobs)
        if self._scheduled:
            for request in self._scheduled:
                message = messages.setdefault(request.client, EngineOutputs())
                message.scheduled = [*message.scheduled, request.number]
                message.scheduled_at = self._scheduled_at
            self._scheduled = []
        return messages

    def _add_columns(
        self,
        messages: dict[int, EngineOutputs],
        results: StepResults,
        logprobs: IntArray | None,
    ) -> None:
        """Add the sequences that got one token. `logprobs`: records of all tokens of the step."""
        if self._clients == [0]:
            messages[0].numbers = results.numbers.tobytes()
            messages[0].token_ids = results.token_ids.tobytes()
            if logprobs is not None:
                messages[0].logprobs = _to_records(logprobs.take(results.samples, axis=0))
            return
        for client in self._clients:
            mine = results.clients == client
            if mine.any():
                message = messages.setdefault(client, EngineOutputs())
                message.numbers = results.numbers[mine].tobytes()
                message.token_ids = results.token_ids[mine].tobytes()
                if logprobs is not None:
                    message.logprobs = _to_records(logprobs.take(results.samples[mine], axis=0))

    def stats(self, step: SchedulerOutput | None = None, num_sampled: int = 0) -> EngineStats:
        """Return current gauges, counts since the last call, and the step's work."""
        stats = self.scheduler.take_stats()
        if self.info.max_lora_rank:
            adapters = self.scheduler.count_by_adapter(self._adapters.names)
            if adapters != self._told_adapters:
                stats.adapters = self._told_adapters = adapters
        if step is not None:
            stats.num_tokens, stats.num_sampled = step.total_tokens, num_sampled
            stats.work = self._work_of(step, stats.num_tokens)
        return stats

    def _work_of(self, step: SchedulerOutput, total: int) -> tuple[float, float, float]:
        """Return (operations, bytes read, bytes written) of a step with `total` tokens.

        Each is a lower bound."""
        info = self.info
        keys = int(step.num_computed.sum()) + total
        pairs = keys  # (query, key) pairs
        if total > len(step.rows):
            tokens = step.num_tokens.astype(np.int64)
            pairs = int(((2 * step.num_computed + tokens + 1) * tokens).sum()) // 2
        operations = 2.0 * info.num_parameters * total + 4.0 * info.attention_size * pairs
        return operations, info.weight_bytes + info.token_bytes * keys, info.token_bytes * total


class _FailedStep:
    """A step that could not be launched."""

    def __init__(self, error: Exception) -> None:
        self._error: Exception | None = error

    def result(self) -> ModelOutput:
        """Raise the error and drop the reference to it.

        The error's traceback keeps the step's memory alive. A reference cycle through this object
        would delay its release until the garbage collector runs."""
        error, self._error = self._error, None
        assert error is not None, "already raised"
        try:
            raise error
        finally:
            del error

    def constrain(self, masks: Masks) -> None:
        pass


def _to_output(step_result: StepResult, result: ModelOutput) -> EngineOutput:
    request = step_result.request
    if request.spec.pooling is not None and step_result.sample >= 0 and step_result.error is None:
        return EngineOutput(
            request.number,
            [],
            finish_reason=FinishReason.STOP.value,
            num_preemptions=request.num_preemptions,
            embedding=result.pooled[step_result.sample].tobytes(),
        )
    output = EngineOutput(
        request.number, [] if step_result.token_id is None else [step_result.token_id]
    )
    is_end = step_result.is_newest and step_result.prompt_logprobs is None
    if request.finish_reason is not None and is_end:
        if request.spec.is_final_only:
            output.token_ids = request.output_token_ids
        output.finish_reason = request.finish_reason.value
        output.stop_reason = request.stop_reason
        output.num_preemptions = request.num_preemptions
        output.num_accepted_drafts = request.num_accepted_drafts
        output.num_rejected_drafts = request.num_rejected_drafts
        output.error = step_result.error
    output.num_cached_tokens = request.num_cached_tokens
    params = request.params
    if (
        result.logprobs is not None
        and step_result.token_id is not None
        and params.logprobs is not None
    ):
        at = step_result.sample
        output.logprobs = _to_records(result.logprobs[at : at + 1], params.logprobs)
    if step_result.prompt_logprobs is not None:
        output.prompt_logprobs = _to_records(
            step_result.prompt_logprobs.records, params.prompt_logprobs
        )
    return output


def _to_records(rows: IntArray, k: int | None = None) -> LogprobRecords:
    """Return records as bytes. `k`: number of likeliest tokens to keep; None: all."""
    if k is not None:
        rows = rows[:, : record_length(k)]
    return LogprobRecords(rows.shape[1] * rows.itemsize, rows.tobytes())


def _sequence_id(client: int, number: int) -> str:
    return f"{client}/{number}"
