"""The engine for servers: the core runs in a process of its own, requests are asyncio streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

import msgspec

from toolkit.config import EngineConfig, ModelConfig
from toolkit.engine.core_client import CoreClient, CoreLink
from toolkit.engine.input_processor import InputProcessor, Prompt
from toolkit.engine.messages import (
    Abort,
    EndRequests,
    EngineOutputs,
    EngineRequest,
    EngineStats,
    ListRequests,
    Ping,
    Pong,
    RequestList,
    ResetPrefixCache,
)
from toolkit.engine.output_processor import Collected, OutputProcessor, RequestState, SequenceState
from toolkit.engine.outputs import Delta, RequestOutput
from toolkit.engine.record import current_record
from toolkit.engine.revival import Reviver
from toolkit.engine.tokenizer import Tokenizer, load_tokenizer
from toolkit.errors import (
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    RequestTimeoutError,
    ServerUnavailableError,
)
from toolkit.logs import LogStyle
from toolkit.metrics import Metrics
from toolkit.models.hub import locate, locate_tokenizer
from toolkit.sampling.params import SamplingParams
from toolkit.worker import Report, WorkerInfo

logger = logging.getLogger(__name__)

MAX_RESUMES = 2
"""Times that a request goes on after the engine died; the next time it may be what kills it."""
FRESH = 1.0
"""Seconds for which a step shows that the engine is well."""
HUNG = 5.0
"""Seconds in which an engine that is well runs a step when it is asked to."""
ANSWER_TIMEOUT = 10.0
"""Seconds that the core gets to answer a question: it looks at them between steps."""
LONG_TEXT = 20_000
"""Characters above which a prompt is tokenized in a thread, so that other requests do not wait."""


class RequestStream:
    """The deltas of one request, as they come; what has piled up comes as one. Iterate it to its end, or
    `close` it, which ends the request.
    """

    def __init__(self, engine: AsyncLLM, state: RequestState, request: EngineRequest) -> None:
        self.state = state
        self.arrival = time.monotonic()
        self.scheduled = 0.0
        self.request = request
        self.num_deaths = 0
        """Cores that have died while it was open."""
        self._engine = engine
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._num_unfinished = len(state.sequences)
        state.wake = self._wake

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """Raises EngineError when the request cannot be finished."""
        if not self._num_unfinished:
            raise StopAsyncIteration
        while (delta := self.state.take()) is None:
            if self._failure is not None:
                self._num_unfinished = 0
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if delta.error is not None:
            self.close()
            raise EngineError(f"The request could not be finished: {delta.error}")
        self._num_unfinished -= delta.finish_reason is not None
        return delta

    def fail(self, error: Exception) -> None:
        """Ends it with an error, which comes after all that came before."""
        self._failure = error
        self._wake()

    def close(self) -> None:
        """Ends the request if it is still running."""
        self._num_unfinished = 0
        self._engine.abort(self.state.id)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncLLM:
    """`async with AsyncLLM("gpt2") as llm: async for output in llm.generate("The sea is"): ...`

    Settings are the flags of `tk serve`, with underscores.
    """

    info: WorkerInfo
    tokenizer: Tokenizer | None

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self._prepare(EngineConfig.from_settings({"model": model, **settings}))

    @classmethod
    def from_config(
        cls, config: EngineConfig, *, metrics: Metrics | None = None, log: LogStyle | None = None
    ) -> AsyncLLM:
        engine = cls.__new__(cls)
        engine._prepare(config, metrics, log)
        return engine

    def _prepare(
        self, config: EngineConfig, metrics: Metrics | None = None, log: LogStyle | None = None
    ) -> None:
        self.config = config
        self.metrics = metrics or Metrics("tk", config.model.model or "tk-demo")
        self.dead: EngineDeadError | None = None
        self.died = asyncio.Event()
        self.paused = False
        """Whether the core has died and another is being started."""
        self._stepped_at = 0.0
        """When the last news came of a step that did not fail."""
        self._pinged_at = 0.0
        """Since when a Ping is unanswered; 0 when none is."""
        self._ponged = asyncio.Event()
        self._step_error: str | None = None
        self.stats = EngineStats()
        self._log = log or LogStyle()
        self._streams: dict[str, RequestStream] = {}
        """In the order in which they came."""
        self._num_asked = 0
        self._asked: dict[int, asyncio.Future[RequestList]] = {}
        """Who waits for which of the core's answers, by ticket."""
        self._waiting: dict[str, int] = {}
        """Those that have not begun to run, and the tokens of their prompts."""
        self.num_waiting_tokens = 0
        """Of those prompts, and of those that are held back until there is room for them (`engine.pooling`)."""
        self._reader: asyncio.Task[None] | None = None
        self._reviver: Reviver | None = None
        """None when somebody else sees to the core, and calls `resume`."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    async def start(self, report: Report | None = None) -> None:
        """Finds the model, starts the core and waits for it. Raises ToolkitError for what the user can mend."""
        folder, tokenizer_folder = await find_folders(self.config.model)
        core = CoreClient(self.config, folder, self._log)
        try:
            # What the core says of a broken folder comes first; then nobody asks what the tokenizer says.
            loading = asyncio.gather(
                asyncio.to_thread(load_tokenizer, tokenizer_folder, self.config.model.chat_template),
                return_exceptions=True,
            )
            info = await core.ready(report or (lambda name, seconds: None))
            [loaded] = await loading
            if isinstance(loaded, BaseException):
                raise loaded
        except BaseException:
            core.kill()
            raise
        self.attach(core, InputProcessor(folder, loaded, info))
        self._reviver = Reviver(self.config, folder, self._log, core)
        self.read()

    def attach(self, core: CoreLink, inputs: InputProcessor) -> None:
        """Makes a core that is ready its own."""
        self._core = core
        self._inputs = inputs
        self.info, self.tokenizer = inputs.info, inputs.tokenizer
        self._outputs = OutputProcessor(inputs.tokenizer)

    def read(self) -> asyncio.Task[None]:
        """From here on, what the core sends is taken in as it comes; what the one before it sent, no more. Where
        somebody else sees to the core, the task ends with what went wrong.
        """
        if self._reader is not None:
            self._reader.cancel()
        self._reader = asyncio.create_task(self._read(), name="engine-outputs")
        return self._reader

    async def submit(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, priority: int = 0
    ) -> RequestStream:
        """Takes a request in. Raises InvalidRequestError when it cannot be run, EngineDeadError when nothing
        can.
        """
        text, request = await self.prepare(prompt, params, request_id=request_id, priority=priority)
        return self.begin(request, text)

    async def prepare(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, priority: int = 0
    ) -> tuple[str | None, EngineRequest]:
        """What `begin` takes: a request's prompt, where it is text, and the request. Raises InvalidRequestError."""
        long = isinstance(prompt, str) and len(prompt) > LONG_TEXT
        if long or params.structured_outputs is not None:  # a grammar may take long to check
            return await asyncio.to_thread(
                self._inputs.process, prompt, params, request_id=request_id, priority=priority
            )
        return self._inputs.process(prompt, params, request_id=request_id, priority=priority)

    def begin(self, request: EngineRequest, text: str | None = None) -> RequestStream:
        """Takes in a request that is checked already. Raises EngineDeadError when nothing can be run."""
        if self.dead is not None:
            raise self.dead
        if request.id in self._streams:
            raise InvalidRequestError(f"There is a request {request.id!r} already.", param="request_id")
        request.client = self._core.client
        record = current_record.get()
        request.arrival = time.monotonic()
        request.origin = record.origin if record is not None else ""
        stream = RequestStream(self, self._outputs.add(request, text), request)
        self._core.send(request)
        self._streams[request.id] = stream
        self._waiting[request.id] = len(request.prompt_token_ids)
        self.num_waiting_tokens += len(request.prompt_token_ids)
        if record is not None:
            record.streams.append(stream)
        return stream

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """The request's output so far, each time it grows. Leaving the loop early ends the request."""
        params = params or SamplingParams(**self.default_sampling)
        stream = await self.submit(prompt, params, request_id=request_id, priority=priority)
        collected = Collected.of(stream.state)
        try:
            async for delta in stream:
                collected.add(delta)
                yield collected.output
        finally:
            stream.close()

    @property
    def inputs(self) -> InputProcessor:
        """What makes requests of prompts."""
        return self._inputs

    @property
    def default_sampling(self) -> dict[str, Any]:
        """What the model itself wants where a request says nothing (generation_config.json)."""
        return self._inputs.default_sampling

    def chat_prompt(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """The tokens of a conversation, by the model's chat template."""
        return self._inputs.chat_prompt(messages, **options)

    def abort(self, request_id: str) -> None:
        """Ends a request, and its stream with it; nothing when it has ended."""
        for sequence in self._end(request_id):
            sequence.end("abort")

    def _end(self, request_id: str) -> list[SequenceState]:
        """Forgets a request and has the core end it; those of its sequences that were still running."""
        stream = self._streams.pop(request_id, None)
        self._waits_no_more(request_id)
        state = self._outputs.remove(request_id)
        if stream is None or state is None:
            return []
        running = [sequence for sequence in state.sequences if not sequence.finished]
        for _ in running:
            self.metrics.finished("abort")
        if self.dead is None:
            self._core.send(Abort([sequence.number for sequence in running], self._core.client))
        return running

    async def live_requests(self) -> RequestList:
        """Every request that the engine has, whoever asked for it. Raises ServerUnavailableError when the engine does
        not answer.
        """
        return await self._ask(lambda ticket: ListRequests(self._core.client, ticket))

    async def end_requests(self, id: str) -> RequestList:
        """Ends the requests with this id, whoever asked for them; their clients see the finish reason "abort". Raises
        ServerUnavailableError when the engine does not answer.
        """
        return await self._ask(lambda ticket: EndRequests(id, self._core.client, ticket))

    async def _ask(self, question: Callable[[int], ListRequests | EndRequests]) -> RequestList:
        if self.dead is not None:
            raise self.dead
        self._num_asked += 1
        ticket = self._num_asked
        answer = self._asked[ticket] = asyncio.get_running_loop().create_future()
        self._core.send(question(ticket))
        try:
            return await asyncio.wait_for(answer, ANSWER_TIMEOUT)
        except TimeoutError:
            raise ServerUnavailableError(f"The engine has not answered for {ANSWER_TIMEOUT:g} s.") from None
        finally:
            self._asked.pop(ticket, None)

    def reset_prefix_cache(self) -> None:
        """Forgets the cached beginnings of prompts."""
        self._core.send(ResetPrefixCache())

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun to run."""
        return len(self._waiting)

    def expire(self, timeout: float) -> None:
        """Ends the requests that came more than so many seconds ago, with an error."""
        latest = time.monotonic() - timeout
        for stream in list(self._streams.values()):
            if stream.arrival > latest:
                break
            stream.fail(RequestTimeoutError(f"The request was not finished within {timeout:g} s."))
            self._end(stream.state.id)

    async def shutdown(self) -> None:
        """Ends the core; requests still running get an error."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})  # it may be starting another core
        self._fail_all(self.dead or EngineDeadError("The engine was shut down."))
        await self._core.stop()

    async def _read(self) -> None:
        while self.dead is None:
            try:
                await self._take_all()
            except Exception as cause:
                if self._reviver is None:
                    raise
                self.pause()
                try:
                    core, info = await self._reviver.another(cause, len(self._streams))
                except EngineDeadError as error:
                    self.fail(error)
                else:
                    self.resume(core, info)

    async def _take_all(self) -> None:
        """Takes in what the core sends. Raises what ended it."""
        while True:
            for message in await self._core.receive():
                if isinstance(message, EngineOutputs):
                    self.take(message)
                elif isinstance(message, RequestList):
                    asking = self._asked.pop(message.ticket, None)
                    if asking is not None and not asking.done():
                        asking.set_result(message)
                elif isinstance(message, Pong):
                    self._pinged_at, self._step_error = 0.0, message.error
                    self._stepped_at = time.monotonic()
                    self._ponged.set()

    def pause(self) -> None:
        """The core has died; another will come. Requests that have seen too many die end."""
        self.paused = True
        self._ponged.set()
        for stream in list(self._streams.values()):
            stream.num_deaths += 1
            if stream.num_deaths > MAX_RESUMES:
                error = f"the engine has died {stream.num_deaths} times while this request was running"
                stream.fail(EngineError(f"The request could not be finished: {error}."))
                self._forget(stream, "error")

    def resume(self, core: CoreLink, info: WorkerInfo) -> None:
        """Goes on with another core. Every open request is computed from its prompt and the tokens that it has, and its
        reader sees no more than a pause.
        """
        before, self._core = self._core, core
        before.kill()
        if core.client == 0:
            self.metrics.restarted()
        self.info = self._inputs.info = info
        self.paused, self._pinged_at = False, 0.0
        for stream in self._streams.values():
            for sequence in stream.state.sequences:
                if not sequence.finished:
                    core.send(_rest(stream.request, sequence, core.client))

    async def check(self) -> None:
        """Returns when a step has been made lately, or an idle core makes one now. Raises ServerUnavailableError when
        the core is being started again or does not answer in time, EngineDeadError when it is gone.
        """
        now = time.monotonic()
        if not self.paused and self.dead is None and now - self._stepped_at > FRESH:
            if not self._pinged_at:
                self._pinged_at = now
                self._ponged.clear()
                self._core.send(Ping(self._core.client))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ponged.wait(), max(0.0, self._pinged_at + HUNG - now))
            if not self._ponged.is_set():
                seconds = time.monotonic() - self._pinged_at
                raise ServerUnavailableError(f"The engine has made no step for {seconds:.0f} s.")
        if self.dead is not None:
            raise self.dead
        if self.paused:
            raise ServerUnavailableError("The engine died and is being started again.")
        if self._step_error is not None:
            raise ServerUnavailableError(f"The engine's steps fail: {self._step_error}")

    def fail(self, error: EngineDeadError) -> None:
        """The core has died: every request ends with this error, and so does every one that comes."""
        self.dead = error
        self._ponged.set()
        self._fail_all(error)
        self.died.set()

    def abort_all(self, reason: str) -> None:
        """Ends every request with an error that says why."""
        for id in list(self._streams):
            self._streams[id].fail(ServerUnavailableError(reason))
            self._end(id)

    def _fail_all(self, error: Exception) -> None:
        for stream in list(self._streams.values()):
            stream.fail(error)
            self._forget(stream, "error")

    def _forget(self, stream: RequestStream, reason: str) -> None:
        self._outputs.remove(stream.state.id)
        self._streams.pop(stream.state.id, None)
        self._waits_no_more(stream.state.id)
        self.metrics.finished(reason)

    def _waits_no_more(self, request_id: str) -> None:
        self.num_waiting_tokens -= self._waiting.pop(request_id, 0)

    def take(self, message: EngineOutputs) -> None:
        """Gives what a step brought to the streams."""
        now = time.monotonic()
        if _shows_a_step(message):
            self._stepped_at, self._step_error = now, None
        if message.stats is not None:
            self.stats = message.stats
            observe_step(self.metrics, message.stats)
        for number in message.scheduled:
            sequence = self._outputs.find(number)
            stream = self._streams.get(sequence.request.id) if sequence is not None else None
            if stream is not None and not stream.scheduled:
                stream.scheduled = message.scheduled_at
                self._waits_no_more(stream.state.id)
                self.metrics.queue_time.observe(max(0.0, stream.scheduled - stream.arrival))
        done = self._outputs.process(message, now)
        num_tokens = len(done.begun)
        for last, count in done.gaps.items():
            self.metrics.inter_token_latency.observe(now - last, count)
            num_tokens += count
        for sequence in done.begun:
            self._observe_begin(sequence, now)
        if num_tokens:
            self.metrics.generation_tokens.inc(num_tokens)
        for sequence, reason in done.finished:
            self._observe_end(sequence, reason, now)
            if sequence.request.finished:
                self._streams.pop(sequence.request.id, None)
                self._waits_no_more(sequence.request.id)
        if done.ended:
            self._core.send(Abort(done.ended, self._core.client))

    def _observe_begin(self, sequence: SequenceState, now: float) -> None:
        m, stream = self.metrics, self._streams.get(sequence.request.id)
        if stream is not None and sequence.index == 0:
            m.time_to_first_token.observe(now - stream.arrival)
            m.observe_prompt(len(stream.state.prompt_token_ids), stream.state.num_cached_tokens)

    def _observe_end(self, sequence: SequenceState, reason: str, now: float) -> None:
        m = self.metrics
        m.finished(reason)
        m.request_generation_tokens.observe(sequence.num_tokens)
        m.request_num_preemptions.observe(sequence.num_preemptions)
        if sequence.num_tokens > 1:
            seconds = sequence.last_token - sequence.first_token
            m.time_per_output_token.observe(seconds / (sequence.num_tokens - 1))
        stream = self._streams.get(sequence.request.id)
        if stream is not None and stream.state.finished:
            m.e2e_request_latency.observe(now - stream.arrival)
            m.request_prompt_tokens.observe(len(stream.state.prompt_token_ids))
            m.request_params_n.observe(len(stream.state.sequences))
            longest = max(sequence.num_tokens for sequence in stream.state.sequences)
            m.request_max_num_generation_tokens.observe(longest)
            m.request_params_max_tokens.observe(stream.request.max_tokens)
            if stream.scheduled and sequence.first_token:
                m.inference_time.observe(now - stream.scheduled)
                m.prefill_time.observe(sequence.first_token - stream.scheduled)
                m.decode_time.observe(now - sequence.first_token)


async def find_folders(model: ModelConfig) -> tuple[Path, Path]:
    """The folders of a model and of its tokenizer, fetched where need be. Raises ToolkitError for what the user can
    mend.
    """
    folder = await asyncio.to_thread(locate, model.model, model.revision)
    if model.tokenizer is None:
        return folder, folder
    return folder, await asyncio.to_thread(locate_tokenizer, model.tokenizer)


def _rest(request: EngineRequest, sequence: SequenceState, client: int) -> EngineRequest:
    """What is left to do of one sequence, as a request of its own."""
    seed = request.params.seed
    if seed is not None:
        seed = (seed + sequence.index + 2**63) % 2**64 - 2**63  # past the largest number comes the smallest
    reported = sequence.request.num_prompt_logprobs
    return msgspec.structs.replace(
        request,
        client=client,
        number=sequence.number,
        params=msgspec.structs.replace(request.params, n=1, seed=seed),
        output_token_ids=sequence.token_ids,
        # the first sequence reports them
        num_prompt_logprobs=len(request.prompt_token_ids) if sequence.index else reported,
        has_siblings=request.params.n > 1,
    )


def _shows_a_step(message: EngineOutputs) -> bool:
    """Whether a step brought it that ran to its end: one that failed has news too, and none of tokens."""
    if message.numbers or (message.stats is not None and message.stats.num_sampled):
        return True
    return any(output.token_ids or output.embedding for output in message.outputs)


def observe_step(metrics: Metrics, stats: EngineStats) -> None:
    """Sets the gauges and adds the counts of a step."""
    metrics.num_requests_running.set(stats.num_running)
    metrics.observe_waiting(stats.num_waiting)
    metrics.kv_cache_usage.set(stats.kv_cache_usage)
    if stats.prefix_cache_queries:
        metrics.prefix_cache_queries.inc(stats.prefix_cache_queries)
        metrics.prefix_cache_hits.inc(stats.prefix_cache_hits)
    if stats.num_preemptions:
        metrics.num_preemptions.inc(stats.num_preemptions)
    if stats.num_tokens:
        metrics.iteration_tokens.observe(stats.num_tokens)
        metrics.batch_size.observe(stats.num_running)
        metrics.throughput.add(stats.num_tokens, stats.num_sampled)
        metrics.observe_work(stats.work)
    if stats.block_times:
        metrics.observe_blocks(stats.block_times)
