"""The engine for servers: the core runs in a process of its own, requests are asyncio streams."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

from toolkit.config import EngineConfig, ModelConfig
from toolkit.engine.core_client import CoreClient, CoreLink
from toolkit.engine.input_processor import InputProcessor, Prompt
from toolkit.engine.messages import (
    Abort,
    EngineOutputs,
    EngineRequest,
    EngineStats,
    ResetPrefixCache,
)
from toolkit.engine.output_processor import Collected, OutputProcessor, RequestState, SequenceState
from toolkit.engine.outputs import Delta, RequestOutput
from toolkit.engine.tokenizer import Tokenizer, load_tokenizer
from toolkit.errors import EngineDeadError, EngineError, InvalidRequestError, ServerUnavailableError
from toolkit.metrics import Metrics
from toolkit.models.hub import locate, locate_tokenizer
from toolkit.sampling.params import SamplingParams
from toolkit.worker import Report, WorkerInfo

logger = logging.getLogger(__name__)

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
        self.max_tokens = request.max_tokens
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
        cls, config: EngineConfig, *, metrics: Metrics | None = None, log_level: str = "info"
    ) -> AsyncLLM:
        engine = cls.__new__(cls)
        engine._prepare(config, metrics, log_level)
        return engine

    def _prepare(
        self, config: EngineConfig, metrics: Metrics | None = None, log_level: str = "warning"
    ) -> None:
        self.config = config
        self.metrics = metrics or Metrics("tk", config.model.model or "tk-demo")
        self.dead: EngineDeadError | None = None
        self.died = asyncio.Event()
        self.stats = EngineStats()
        self._log_level = log_level
        self._streams: dict[str, RequestStream] = {}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    async def start(self, report: Report | None = None) -> None:
        """Finds the model, starts the core and waits for it. Raises ToolkitError for what the user can mend."""
        folder, tokenizer_folder = await find_folders(self.config.model)
        core = CoreClient(self.config, folder, self._log_level)
        try:
            # What the core says of a broken folder comes first; then nobody asks what the tokenizer says.
            loading = asyncio.gather(
                asyncio.to_thread(load_tokenizer, tokenizer_folder), return_exceptions=True
            )
            info = await core.ready(report or (lambda name, seconds: None))
            [loaded] = await loading
            if isinstance(loaded, BaseException):
                raise loaded
        except BaseException:
            core.kill()
            raise
        self.attach(core, InputProcessor(folder, loaded, info))
        self.read()

    def attach(self, core: CoreLink, inputs: InputProcessor) -> None:
        """Makes a core that is ready its own."""
        self._core = core
        self._inputs = inputs
        self.info, self.tokenizer = inputs.info, inputs.tokenizer
        self._outputs = OutputProcessor(inputs.tokenizer)

    def read(self) -> None:
        """From here on, what the core sends is taken in as it comes."""
        self._reader = asyncio.create_task(self._read(), name="engine-outputs")

    async def submit(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, priority: int = 0
    ) -> RequestStream:
        """Takes a request in. Raises InvalidRequestError when it cannot be run, EngineDeadError when nothing
        can.
        """
        if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
            text, request = await asyncio.to_thread(
                self._inputs.process, prompt, params, request_id=request_id, priority=priority
            )
        else:
            text, request = self._inputs.process(prompt, params, request_id=request_id, priority=priority)
        if self.dead is not None:
            raise self.dead
        if request.id in self._streams:
            raise InvalidRequestError(f"There is a request {request.id!r} already.", param="request_id")
        request.client = self._core.client
        stream = RequestStream(self, self._outputs.add(request, text), request)
        self._core.send(request)
        self._streams[request.id] = stream
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
        state = self._outputs.remove(request_id)
        if stream is None or state is None:
            return []
        running = [sequence for sequence in state.sequences if not sequence.finished]
        for _ in running:
            self.metrics.finished("abort")
        if self.dead is None:
            self._core.send(Abort([sequence.number for sequence in running], self._core.client))
        return running

    def reset_prefix_cache(self) -> None:
        """Forgets the cached beginnings of prompts."""
        self._core.send(ResetPrefixCache())

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    async def shutdown(self) -> None:
        """Ends the core; requests still running get an error."""
        self._reader.cancel()
        self._fail_all(self.dead or EngineDeadError("The engine was shut down."))
        await self._core.stop()

    async def _read(self) -> None:
        try:
            while True:
                for message in await self._core.receive():
                    if isinstance(message, EngineOutputs):
                        self.take(message)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            dead = as_dead(error)
            logger.error("%s", dead, exc_info=None if error is dead else error)
            self.fail(dead)

    def fail(self, error: EngineDeadError) -> None:
        """The core has died: every request ends with this error, and so does every one that comes."""
        self.dead = error
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
            self._outputs.remove(stream.state.id)
            self.metrics.finished("error")
        self._streams.clear()

    def take(self, message: EngineOutputs) -> None:
        """Gives what a step brought to the streams."""
        now = time.monotonic()
        if message.stats is not None:
            self.stats = message.stats
            observe_step(self.metrics, message.stats)
        for number in message.scheduled:
            sequence = self._outputs.find(number)
            stream = self._streams.get(sequence.request.id) if sequence is not None else None
            if stream is not None and not stream.scheduled:
                stream.scheduled = message.scheduled_at
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
        if done.ended:
            self._core.send(Abort(done.ended, self._core.client))

    def _observe_begin(self, sequence: SequenceState, now: float) -> None:
        m, stream = self.metrics, self._streams.get(sequence.request.id)
        if stream is not None and sequence.index == 0:
            m.time_to_first_token.observe(now - stream.arrival)
            m.prompt_tokens.inc(len(stream.state.prompt_token_ids))
            m.prompt_tokens_cached.inc(stream.state.num_cached_tokens)

    def _observe_end(self, sequence: SequenceState, reason: str, now: float) -> None:
        m = self.metrics
        m.finished(reason)
        m.request_generation_tokens.observe(sequence.num_tokens)
        if sequence.num_tokens > 1:
            seconds = sequence.last_token - sequence.first_token
            m.time_per_output_token.observe(seconds / (sequence.num_tokens - 1))
        stream = self._streams.get(sequence.request.id)
        if stream is not None and stream.state.finished:
            m.e2e_request_latency.observe(now - stream.arrival)
            m.request_prompt_tokens.observe(len(stream.state.prompt_token_ids))
            m.request_params_n.observe(len(stream.state.sequences))
            m.request_params_max_tokens.observe(stream.max_tokens)
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


def as_dead(error: Exception) -> EngineDeadError:
    """What ended the core, as every request is told."""
    return error if isinstance(error, EngineDeadError) else EngineDeadError(f"The engine stopped: {error}")


def observe_step(metrics: Metrics, stats: EngineStats) -> None:
    """Sets the gauges and adds the counts of a step."""
    metrics.num_requests_running.set(stats.num_running)
    metrics.num_requests_waiting.set(stats.num_waiting)
    metrics.kv_cache_usage.set(stats.kv_cache_usage)
    if stats.prefix_cache_queries:
        metrics.prefix_cache_queries.inc(stats.prefix_cache_queries)
        metrics.prefix_cache_hits.inc(stats.prefix_cache_hits)
    if stats.num_preemptions:
        metrics.num_preemptions.inc(stats.num_preemptions)
    if stats.num_tokens:
        metrics.iteration_tokens.observe(stats.num_tokens)
