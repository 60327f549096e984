"""The engine for servers: cores run in their own processes, requests are asyncio streams."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import msgspec

from toolkit.config import EngineConfig, ModelConfig
from toolkit.engine.cores.core_client import CoreLink, CoreMessage
from toolkit.engine.cores.launch import plan_launches, smallest_core
from toolkit.engine.cores.pool import Core, CorePool
from toolkit.engine.cores.replica import Query, Replica, lost_core_error
from toolkit.engine.cores.router import Router
from toolkit.engine.front.adapters import AdapterRegistry
from toolkit.engine.front.features import FeatureSource, FeatureStore
from toolkit.engine.front.input_processor import InputProcessor, Prepared, Prompt
from toolkit.engine.front.observation import observe_step
from toolkit.engine.front.output_processor import OutputCollector, OutputProcessor, SequenceState
from toolkit.engine.front.pictures import (
    Picture,
    Pictures,
    make_pictures,
    pictures_in,
    require_sight,
)
from toolkit.engine.front.request_stats import (
    current_stats,
    observe_first_token,
    observe_sequence_end,
)
from toolkit.engine.front.stream import RequestStream
from toolkit.engine.local_files import with_local_files
from toolkit.engine.messages import (
    Abort,
    EndRequests,
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    GiveFeature,
    ListRequests,
    NeedFeature,
    Operate,
    PrefixCacheCleared,
    RequestList,
    ResetPrefixCache,
)
from toolkit.engine.outputs import RequestOutput
from toolkit.errors import (
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    RequestTimeoutError,
    ServerUnavailableError,
    ToolkitError,
)
from toolkit.hub import locate, locate_tokenizer
from toolkit.logs import LogStyle
from toolkit.metrics import Metrics
from toolkit.sampling.logits_processors import preload
from toolkit.sampling.params import SamplingParams
from toolkit.scheduler.stats import EngineStats, total
from toolkit.sequence import Adapter, LoRARequest
from toolkit.text.tokenizer import Tokenizer, load_tokenizer
from toolkit.worker import Report, WorkerInfo
from toolkit.worker.operations import LoadAdapter, UnloadAdapter

logger = logging.getLogger(__name__)

MAX_RESUMES = 2
"""Core deaths that a request survives. After more, the request itself may be the cause."""
LONG_TEXT = 20_000
"""Longest prompt, in characters, that is tokenized in the event loop; longer ones in a thread."""


class AsyncLLM:
    """Asynchronous engine. Its settings are the flags of `tk serve`, with underscores.

    >>> async with AsyncLLM("gpt2") as llm:
    ...     async for output in llm.generate("The sea is"):
    ...         print(output.outputs[0].text)"""

    info: WorkerInfo
    tokenizer: Tokenizer | None

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        metrics: Metrics | None = None,
        log: LogStyle | None = None,
        adapter_file: Path | None = None,
        **settings: Any,
    ) -> None:
        """Take `settings`, or a `config` that holds them all. Nothing is loaded before `start`.

        `adapter_file`: see `AdapterRegistry`."""
        self.config = config = config or EngineConfig.from_settings({"model": model, **settings})
        self.metrics = metrics or Metrics("tk", config.model.model or "tk-demo")
        self.adapters = AdapterRegistry(config.lora, adapter_file)
        self.metrics.max_loras = config.lora.max_loras
        self.fatal_error: EngineDeadError | None = None
        """Set once no core runs or will be restarted."""
        self.died = asyncio.Event()
        self.cores = CorePool(0, self)
        self.replicas: list[Replica] = []
        self._log = log or LogStyle()
        self._router: Router | None = None  # None with a single core
        self._streams: dict[str, RequestStream] = {}  # in order of arrival
        self._features = FeatureStore()
        self._pictures: Pictures | None = None  # prepares those of prompts
        self._waiting: dict[str, int] = {}
        """Prompt tokens of each request that has not started to run, by request id."""
        self.num_waiting_tokens = 0
        """Prompt tokens of waiting requests, including prompts that `pool` holds back."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    async def start(self, report: Report | None = None) -> None:
        """Find the model and start the cores; return once they are ready. Raises ToolkitError."""
        folder, tokenizer_folder = await find_folders(self.config.model)
        config = await asyncio.to_thread(with_local_files, self.config)
        launches = plan_launches(config, folder, self._log)
        self.cores = CorePool.launch(launches, self)
        try:
            # The core's error about a broken folder precedes the tokenizer's error.
            loading = asyncio.gather(
                asyncio.to_thread(
                    load_tokenizer, tokenizer_folder, self.config.model.chat_template
                ),
                asyncio.to_thread(preload, self.config.plugins),
                return_exceptions=True,
            )
            infos = await self.cores.ready(report or (lambda name, seconds: None))
            loaded, _ = await loading
            if isinstance(loaded, BaseException):
                raise loaded
        except BaseException:
            await self.cores.stop_watching()
            self.cores.kill()
            raise
        info = smallest_core(infos)
        pictures = make_pictures(info.sight, self.config.pictures)
        self._use_cores(InputProcessor(folder, loaded, info, config.model, pictures))
        for replica in self.replicas:
            self.cores.watch(replica.index)

    def connect_cores(
        self, cores: Sequence[tuple[CoreLink, WorkerInfo] | None], inputs: InputProcessor
    ) -> None:
        """Connect to ready cores of another process. None: a core that does not run now."""
        self.cores = CorePool(len(cores), self)
        for index, core in enumerate(cores):
            if core is not None:
                self.cores.connect(index, *core)
        self._use_cores(inputs)

    def _use_cores(self, inputs: InputProcessor) -> None:
        """Take requests for the cores that are ready."""
        cores = self.cores.cores
        if len(cores) > 1:
            self._router = Router(len(cores))
        self.replicas = [Replica(core, self.metrics.for_engine(core.index)) for core in cores]
        self._inputs, self._pictures = inputs, inputs.pictures
        self.tokenizer = inputs.tokenizer
        self._outputs = OutputProcessor(inputs.tokenizer)
        self._client = next(core.link.client for core in cores if core.link is not None)
        self._random = random.Random(f"{self.config.model.seed}/{self._client}")
        for core in cores:
            if core.is_ready:
                self._connect(core)
        self.adapters.start(self.info.adapters)

    def _connect(self, core: Core) -> None:
        self.replicas[core.index].connect()
        if self._router is not None and core.info is not None:
            info = core.info
            capacity, has_states = info.cache_tokens, info.num_state_slots > 0
            self._router.connect(core.index, capacity, has_states=has_states)
        self.info = smallest_core(self.cores.infos)
        self._inputs.info = self.info

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        adapter: Adapter | None = None,
    ) -> RequestStream:
        """Start a request. Raises InvalidRequestError, or EngineDeadError if no core will run."""
        prepared = await self.prepare(
            prompt, params, request_id=request_id, priority=priority, adapter=adapter
        )
        return self.start_request(prepared.request, prepared.text, prepared.features)

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        adapter: Adapter | None = None,
    ) -> Prepared:
        """Return the request of a prompt. Raises InvalidRequestError."""
        pictures = await self._pictures_of(prompt)
        process = partial(
            self._inputs.process,
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            adapter=adapter,
            pictures=pictures,
        )
        is_long = isinstance(prompt, str) and len(prompt) > LONG_TEXT
        has_clip = self.info.hears and isinstance(prompt, Mapping)
        # Checking a grammar, and the digest of a clip, can be slow.
        if is_long or params.structured_outputs is not None or has_clip:
            return await asyncio.to_thread(process)
        return process()

    def start_request(
        self,
        request: EngineRequest,
        text: str | None = None,
        features: Mapping[bytes, FeatureSource] = MappingProxyType({}),
    ) -> RequestStream:
        """Start a checked request. `features`: sources of those of its spec, by digest.

        Raises EngineDeadError if no core will run again."""
        if self.fatal_error is not None:
            raise self.fatal_error
        if request.id in self._streams:
            raise InvalidRequestError(
                f"A request {request.id!r} exists already.", param="request_id"
            )
        self._features.hold(request.id, features)
        request.client = self._client
        stats = current_stats.get()
        request.arrival = time.monotonic()
        request.origin = stats.origin if stats is not None else ""
        if self._router is not None and request.spec.params.seed is None:
            # Otherwise all cores would draw the same seeds.
            request.seed = self._random.getrandbits(63)
        stream = RequestStream(self.abort, self._outputs.add(request, text), request)
        replica = self._choose_core(stream)
        if replica is not None:
            replica.link.send(request)
            if self._router is not None:
                # Detects a hung core, which then gets no more requests.
                replica.probe(time.monotonic())
        self._streams[request.id] = stream
        self._waiting[request.id] = request.spec.num_prompt_tokens
        self.num_waiting_tokens += request.spec.num_prompt_tokens
        if stats is not None:
            stats.streams.append(stream)
        return stream

    async def _pictures_of(self, prompt: Prompt) -> list[Picture]:
        """Return the pictures of a prompt, once their sizes are known."""
        images = pictures_in(prompt)
        if not images:
            return []
        pictures = require_sight(self._pictures, self.config.model.model or "tk-demo")
        pictures.require_number(len(images), "prompt")
        measured = [pictures.take(one, "multi_modal_data") for one in images]
        return [await asyncio.wrap_future(one) for one in measured]

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the output so far each time it grows. Leaving the loop early ends the request."""
        params = params or SamplingParams(**self.default_sampling)
        adapter = self.adapters.resolve(lora_request)
        stream = await self.submit(
            prompt, params, request_id=request_id, priority=priority, adapter=adapter
        )
        collected = OutputCollector.of(stream.state)
        try:
            async for delta in stream:
                collected.add(delta)
                yield collected.output
        finally:
            stream.close()

    @property
    def inputs(self) -> InputProcessor:
        return self._inputs

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Defaults from the model's generation_config.json."""
        return self._inputs.default_sampling

    def abort(self, request_id: str) -> None:
        """End a request and its stream. No effect if it has ended."""
        for sequence in self._abort_in_core(request_id):
            sequence.end("abort")

    def _choose_core(self, stream: RequestStream) -> Replica | None:
        """Assign a core to a request. Returns None if none is running."""
        if self._router is None:
            [only] = self.replicas
            stream.replica = only if only.is_running else None
            return stream.replica
        if stream.placement is not None:
            self._router.release(stream.placement)
        stream.placement = stream.replica = None
        live = [replica for replica in self.replicas if replica.is_running]
        running = [one.index for one in [one for one in live if one.is_trusted] or live]
        if running:
            caches = self.config.cache.enable_prefix_caching
            stream.placement = self._router.place(stream.request.spec, running, caches=caches)
            stream.replica = self.replicas[stream.placement.core]
        return stream.replica

    def _resume_elsewhere(self, stream: RequestStream) -> None:
        """Continue a request on another core from its prompt and the tokens generated so far.

        Its reader notices only a pause. If no core is running, the request waits for one."""
        replica = self._choose_core(stream)
        if replica is not None:
            has_started = any(sequence.token_ids for sequence in stream.state.sequences)
            if has_started and stream.placement is not None and self._router is not None:
                self._router.mark_computed(stream.placement)  # recomputation is not reported
            for sequence in stream.state.sequences:
                if not sequence.is_finished:
                    message = _remaining_request(stream.request, sequence, self._client)
                    replica.link.send(message)

    def _abort_in_core(self, request_id: str) -> list[SequenceState]:
        """Remove a request, end it in its core, and return its unfinished sequences."""
        stream = self._unregister(request_id)
        state = self._outputs.remove(request_id)
        if stream is None or state is None:
            return []
        running = [sequence for sequence in state.sequences if not sequence.is_finished]
        if running:
            self.metrics_of(stream).count_finished("abort")
        if stream.replica is not None:
            stream.replica.send(Abort([sequence.number for sequence in running], self._client))
        return running

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Read an adapter on all cores, then serve it, in place of another revision of it.

        Requests that run keep theirs. Raises InvalidRequestError if the path is not allowed or the
        adapter does not fit, ModelNotFoundError, or ServerUnavailableError if a core does not
        answer; then nothing has changed."""
        adapter = await asyncio.to_thread(self.adapters.find_at, name, path)
        before = self.adapters.find(name)
        if self.fatal_error is not None:
            raise self.fatal_error
        running = [replica for replica in self.replicas if replica.is_running]
        if not running:
            raise ServerUnavailableError("The engine died and is being restarted.")
        results = await asyncio.gather(
            *(one.operate(LoadAdapter(adapter)) for one in running), return_exceptions=True
        )
        failures = [one for one in results if isinstance(one, BaseException)]
        if failures:
            if adapter != before:
                self._drop_adapter(adapter)
            if isinstance(failures[0], InvalidRequestError):
                self.adapters.note_reading(adapter, is_broken=True)
            raise failures[0]
        # The other revision stays in memory until another adapter needs its place: requests that
        # have found it may still be on their way.
        self.adapters.put(adapter)
        return adapter

    def unload_adapter(self, name: str) -> Adapter | None:
        """Serve an adapter no longer. Requests that run keep it. Return None if it is unknown."""
        adapter = self.adapters.remove(name)
        if adapter is not None:
            self._drop_adapter(adapter)
        return adapter

    def _drop_adapter(self, adapter: Adapter) -> None:
        """Let the cores free an adapter's memory when no request uses it."""
        for replica in self.replicas:
            replica.send(Operate(UnloadAdapter(adapter), self._client, 0))

    async def live_requests(self) -> RequestList:
        """Return the live requests of all clients. Raises ServerUnavailableError."""
        return await self._query_cores(ListRequests)

    async def end_requests(self, id: str) -> RequestList:
        """End the requests with this id, of any client, with the finish reason "abort".

        Raises ServerUnavailableError if the engine does not answer."""
        return await self._query_cores(lambda client, ticket: EndRequests(id, client, ticket))

    async def _query_cores(self, query: Query) -> RequestList:
        """Merge the answers of all cores. Silent cores are ignored if another has requests."""
        if self.fatal_error is not None:
            raise self.fatal_error
        running = [replica for replica in self.replicas if replica.is_running]
        if not running:
            raise ServerUnavailableError("The engine died and is being restarted.")
        asked = (replica.query(query) for replica in running)
        found = await asyncio.gather(*asked, return_exceptions=True)
        answers = [answer for answer in found if isinstance(answer, RequestList)]
        failures = [error for error in found if isinstance(error, BaseException)]
        if failures and not any(answer.requests for answer in answers):
            raise failures[0]
        requests = sorted(
            (one for answer in answers for one in answer.requests), key=lambda one: -one.age
        )
        usage = sum(answer.kv_cache_usage for answer in answers) / len(answers)
        return RequestList(0, requests, usage)

    def reset_prefix_cache(self) -> None:
        """Evict cached prompts. Each core confirms it to all of its front ends."""
        for replica in self.replicas:
            replica.send(ResetPrefixCache())

    @property
    def stats(self) -> EngineStats:
        """Statistics of the latest steps, summed over cores."""
        return total([replica.stats for replica in self.replicas])

    @property
    def num_cores(self) -> int:
        """Cores that are running or restarting: at least 1."""
        return max(1, sum(replica.fatal_error is None for replica in self.replicas))

    @property
    def max_num_running(self) -> int:
        """Maximum number of requests that run at once."""
        return self.config.scheduler.max_num_seqs * self.num_cores

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    @property
    def num_waiting(self) -> int:
        """Requests that have not started to run."""
        return len(self._waiting)

    def expire(self, timeout: float) -> None:
        """End requests older than `timeout` seconds with an error."""
        latest = time.monotonic() - timeout
        for stream in list(self._streams.values()):
            if stream.arrival > latest:
                break
            stream.fail(RequestTimeoutError(f"The request was not finished within {timeout:g} s."))
            self._abort_in_core(stream.state.id)

    async def shutdown(self) -> None:
        """Stop the cores. Unfinished requests get an error."""
        await self.cores.stop_watching()
        self._fail_all(self.fatal_error or EngineDeadError("The engine was shut down."))
        await self.cores.stop()
        if self._pictures is not None:
            await asyncio.to_thread(self._pictures.close)

    # ---- what happens to cores (`cores.pool.CoreEvents`)

    def on_message(self, core: Core, message: CoreMessage) -> None:
        replica = self.replicas[core.index]
        if isinstance(message, EngineOutputs):
            self.handle_outputs(message, replica)
        elif isinstance(message, NeedFeature):
            self._give_feature(replica.link, message.digest)
        elif isinstance(message, PrefixCacheCleared):
            if self._router is not None:
                self._router.clear_prefixes(core.index)
        else:
            replica.handle(message)

    def _give_feature(self, link: CoreLink, digest: bytes) -> None:
        """Send a core the bytes of a feature once they are loaded."""
        loading, loop = self._features.load(digest), asyncio.get_running_loop()
        if loading is None:
            link.send(GiveFeature(digest, self._client, False))
            return

        def give(done: Future[bytes]) -> None:
            if (error := done.exception()) is not None:
                link.send(GiveFeature(digest, self._client, False, str(error)))
            else:
                link.send(GiveFeature(digest, self._client, True), done.result())

        def call(done: Future[bytes]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(give, done)

        loading.add_done_callback(call)

    def on_failed(self, cores: Sequence[Core]) -> int:
        """Move the requests of dead cores, whose replacements are starting, to the ready cores.

        If no core is ready, they wait for the first replacement. Requests that exceed MAX_RESUMES
        fail."""
        gone = [self.replicas[core.index] for core in cores]
        for replica in gone:
            replica.disconnect()
        for stream in [stream for stream in self._streams.values() if stream.replica in gone]:
            stream.num_deaths += 1
            if stream.num_deaths <= MAX_RESUMES:
                self._resume_elsewhere(stream)
                continue
            error = f"the engine died {stream.num_deaths} times while it was running"
            stream.fail(EngineError(f"The request could not be finished: {error}."))
            self._discard(stream, "error")
        return sum(stream.replica is None for stream in self._streams.values())

    def on_replaced(self, core: Core) -> None:
        """Continue the requests that wait for a core."""
        self._connect(core)
        link, metrics = self.replicas[core.index].link, self.replicas[core.index].metrics
        if link.client == 0:
            metrics.count_restart()
        for stream in self._streams.values():
            if stream.replica is None:
                self._resume_elsewhere(stream)
        # Adapters that are not read now are read when a request needs them.
        for adapter in self.adapters.loaded[-self.config.lora.num_in_memory :]:
            link.send(Operate(LoadAdapter(adapter), self._client, 0))

    def on_lost(self, core: Core, error: EngineDeadError) -> None:
        """Go on with the other cores. After the last, all requests fail."""
        if all(one.is_dead for one in self.cores.cores):
            self.fatal_error = error
            self._fail_all(error)
            self.died.set()
        elif core.restarter is not None:
            logger.error("%s", lost_core_error(error))

    def observe_loads(self, num_sequences: Sequence[int]) -> None:
        """Update the number of sequences on each core. Needed with several front ends."""
        if self._router is not None:
            self._router.observe_loads(num_sequences)

    async def check(self) -> None:
        """Return if all cores are healthy: each has made a step lately, or makes one now.

        A restarting core is ignored while another is healthy. Raises ServerUnavailableError, or
        EngineDeadError if a core is permanently lost."""
        if self.fatal_error is not None:
            raise self.fatal_error
        results = await asyncio.gather(
            *(one.check() for one in self.replicas), return_exceptions=True
        )
        failures = [
            error
            for replica, error in zip(self.replicas, results, strict=True)
            if error is not None
            and (None not in results or replica.is_running or replica.fatal_error is not None)
        ]
        if failures:
            raise failures[0]

    async def check_some(self) -> None:
        """Return if one core is healthy. Raises like `check`."""
        checks = [asyncio.ensure_future(replica.check()) for replica in self.replicas]
        failures = []
        try:
            for check in asyncio.as_completed(checks):
                try:
                    return await check
                except ToolkitError as error:
                    failures.append(error)
        finally:
            for unneeded in checks:
                unneeded.cancel()
        raise self.fatal_error or failures[0]

    def abort_all(self, reason: str) -> None:
        """End every request with an error that states the reason."""
        for id in list(self._streams):
            self._streams[id].fail(ServerUnavailableError(reason))
            self._abort_in_core(id)

    def _fail_all(self, error: Exception) -> None:
        for stream in list(self._streams.values()):
            stream.fail(error)
            self._discard(stream, "error")

    def _discard(self, stream: RequestStream, reason: str) -> None:
        self._outputs.remove(stream.state.id)
        self._unregister(stream.state.id)
        self.metrics_of(stream).count_finished(reason)

    def _unregister(self, request_id: str) -> RequestStream | None:
        """Remove a request's stream, waiting tokens and placement."""
        stream = self._streams.pop(request_id, None)
        self._features.release(request_id)
        self._stop_waiting(request_id)
        if stream is not None and stream.placement is not None and self._router is not None:
            self._router.release(stream.placement)
        return stream

    def _stop_waiting(self, request_id: str) -> None:
        self.num_waiting_tokens -= self._waiting.pop(request_id, 0)

    def metrics_of(self, stream: RequestStream) -> Metrics:
        """Return the metrics of the request's core."""
        return self.metrics if stream.replica is None else stream.replica.metrics

    def handle_outputs(self, message: EngineOutputs, replica: Replica) -> None:
        """Pass the results of a core's step to the streams."""
        now = time.monotonic()
        metrics = replica.metrics
        replica.record_step(message, now)
        if message.stats is not None:
            observe_step(metrics, message.stats)
        for number in message.scheduled:
            sequence = self._outputs.find(number)
            stream = self._streams.get(sequence.request.id) if sequence is not None else None
            if stream is not None and not stream.scheduled:
                stream.scheduled = message.scheduled_at
                self._stop_waiting(stream.state.id)
                metrics.queue_time.observe(max(0.0, stream.scheduled - stream.arrival))
        for output in message.outputs:
            if output.adapter_failed:
                self._note_failed_adapter(output)
        changes = self._outputs.process(message, now)
        num_tokens = sum(sequence.num_tokens > 0 for sequence in changes.started)
        for last, count in changes.gaps.items():
            metrics.inter_token_latency.observe(now - last, count)
            num_tokens += count
        for sequence in changes.started:
            stream = self._streams.get(sequence.request.id)
            if stream is not None and sequence.index == 0:
                observe_first_token(metrics, stream, now)
                if stream.request.spec.adapter is not None:
                    self.adapters.note_reading(stream.request.spec.adapter, is_broken=False)
                if stream.placement is not None and self._router is not None:
                    self._router.mark_computed(stream.placement)
        if num_tokens:
            metrics.generation_tokens.inc(num_tokens)
        for sequence, reason in changes.finished:
            replica.record_end(reason, now)
            observe_sequence_end(
                metrics, sequence, self._streams.get(sequence.request.id), reason, now
            )
            if sequence.request.is_finished:
                self._unregister(sequence.request.id)
        if changes.stopped:
            replica.send(Abort(changes.stopped, self._client))

    def _note_failed_adapter(self, output: EngineOutput) -> None:
        sequence = self._outputs.find(output.number)
        stream = self._streams.get(sequence.request.id) if sequence is not None else None
        adapter = stream.request.spec.adapter if stream is not None else None
        if adapter is not None and self.adapters.note_reading(adapter, is_broken=True):
            logger.warning("%s", output.error)


async def find_folders(model: ModelConfig) -> tuple[Path, Path]:
    """Return (model folder, tokenizer folder). Downloads missing files. Raises ToolkitError."""
    folder = await asyncio.to_thread(locate, model.model, model.revision)
    if model.tokenizer is None:
        return folder, folder
    return folder, await asyncio.to_thread(locate_tokenizer, model.tokenizer)


def _remaining_request(
    request: EngineRequest, sequence: SequenceState, client: int
) -> EngineRequest:
    """Return a request for the part of one sequence that is not computed yet."""
    return msgspec.structs.replace(
        request,
        client=client,
        number=sequence.number,
        index=sequence.index,
        output_token_ids=sequence.token_ids,
        num_prompt_logprobs=sequence.request.num_prompt_logprobs,
    )
