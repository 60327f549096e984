"""The engine for servers: its cores run in processes of their own, requests are asyncio streams."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from toolkit.config import EngineConfig, ModelConfig
from toolkit.engine.cores.core_client import CoreClient, CoreLink, all_ready
from toolkit.engine.cores.launch import least, name_of, plan
from toolkit.engine.cores.replica import Question, Replica, without_it
from toolkit.engine.cores.revival import Reviver
from toolkit.engine.cores.router import Router
from toolkit.engine.input_processor import InputProcessor, Prompt
from toolkit.engine.messages import (
    Abort,
    EndRequests,
    EngineOutputs,
    EngineRequest,
    Forgotten,
    ListRequests,
    RequestList,
    ResetPrefixCache,
)
from toolkit.engine.observation import observe_step
from toolkit.engine.output_processor import Collected, OutputProcessor, SequenceState
from toolkit.engine.outputs import RequestOutput
from toolkit.engine.request_stats import current_record, observe_begin, observe_end
from toolkit.engine.stream import RequestStream
from toolkit.errors import (
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    RequestTimeoutError,
    ServerUnavailableError,
    ToolkitError,
)
from toolkit.logs import LogStyle
from toolkit.metrics import Metrics
from toolkit.models.hub import locate, locate_tokenizer
from toolkit.sampling.params import SamplingParams
from toolkit.scheduler.stats import EngineStats, total
from toolkit.text.tokenizer import Tokenizer, load_tokenizer
from toolkit.worker import Report, WorkerInfo

logger = logging.getLogger(__name__)

MAX_RESUMES = 2
"""Times that a request goes on after the engine died; the next time it may be what kills it."""
LONG_TEXT = 20_000
"""Characters above which a prompt is tokenized in a thread, so that other requests do not wait."""


class AsyncLLM:
    """`async with AsyncLLM("gpt2") as llm: async for output in llm.generate("The sea is"): ...`

    Settings are the flags of `tk serve`, with underscores.
    """

    info: WorkerInfo
    tokenizer: Tokenizer | None

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        metrics: Metrics | None = None,
        log: LogStyle | None = None,
        **settings: Any,
    ) -> None:
        """`settings`, or `config`, which holds them all. Nothing is loaded before `start`."""
        self.config = config = config or EngineConfig.from_settings({"model": model, **settings})
        self.metrics = metrics or Metrics("tk", config.model.model or "tk-demo")
        self.dead: EngineDeadError | None = None
        """Why no core runs, and none will."""
        self.died = asyncio.Event()
        self.replicas: list[Replica] = []
        self._log = log or LogStyle()
        self._router: Router | None = None
        """None when there is one core, and nothing to choose."""
        self._streams: dict[str, RequestStream] = {}
        """In the order in which they came."""
        self._waiting: dict[str, int] = {}
        """Those that have not begun to run, and the tokens of their prompts."""
        self.num_waiting_tokens = 0
        """Of those prompts, and of those that are held back until there is room for them (`engine.pooling`)."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    async def start(self, report: Report | None = None) -> None:
        """Finds the model, starts the cores and waits for them. Raises ToolkitError for what the user can mend."""
        folder, tokenizer_folder = await find_folders(self.config.model)
        launches = plan(self.config, folder, self._log)
        cores = [CoreClient(launch) for launch in launches]
        try:
            # What the core says of a broken folder comes first; then nobody asks what the tokenizer says.
            loading = asyncio.gather(
                asyncio.to_thread(
                    load_tokenizer, tokenizer_folder, self.config.model.chat_template
                ),
                return_exceptions=True,
            )
            infos = await all_ready(cores, report or (lambda name, seconds: None))
            [loaded] = await loading
            if isinstance(loaded, BaseException):
                raise loaded
        except BaseException:
            for core in cores:
                core.kill()
            raise
        self.attach(
            list(zip(cores, infos, strict=True)), InputProcessor(folder, loaded, least(infos))
        )
        for replica, launch, core, info in zip(self.replicas, launches, cores, infos, strict=True):
            replica.reviver = Reviver(launch.like(info), core)
            self.read(replica.index)

    def attach(
        self, cores: Sequence[tuple[CoreLink, WorkerInfo] | None], inputs: InputProcessor
    ) -> None:
        """Makes cores that are ready its own; None: one that will come later (`resume`), or never (`lose`)."""
        count = len(cores)
        if count > 1:
            self._router = Router(count)
        self.replicas = [
            Replica(i, name_of(i, count), self.metrics.for_engine(i)) for i in range(count)
        ]
        self._inputs = inputs
        self.tokenizer = inputs.tokenizer
        self._outputs = OutputProcessor(inputs.tokenizer)
        self._client = next(core[0].client for core in cores if core is not None)
        self._random = random.Random(f"{self.config.model.seed}/{self._client}")
        for index, core in enumerate(cores):
            if core is not None:
                self._connect(index, *core)

    def _connect(self, index: int, link: CoreLink, info: WorkerInfo) -> None:
        self.replicas[index].connect(link, info)
        if self._router is not None:
            self._router.connect(index, info.num_blocks * info.block_size)
        self.info = least([replica.info for replica in self.replicas if replica.info is not None])
        self._inputs.info = self.info

    def read(self, index: int = 0) -> asyncio.Task[None]:
        """From here on, what a core sends is taken in as it comes; what the one before it sent, no more. Where
        somebody else sees to the core, the task ends with what went wrong.
        """
        replica = self.replicas[index]
        if replica.reader is not None:
            replica.reader.cancel()
        replica.reader = asyncio.create_task(self._read(replica), name=f"engine-outputs-{index}")
        return replica.reader

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> RequestStream:
        """Takes a request in. Raises InvalidRequestError when it cannot be run, EngineDeadError when nothing
        can.
        """
        text, request = await self.prepare(prompt, params, request_id=request_id, priority=priority)
        return self.begin(request, text)

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
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
            raise InvalidRequestError(
                f"There is a request {request.id!r} already.", param="request_id"
            )
        request.client = self._client
        record = current_record.get()
        request.arrival = time.monotonic()
        request.origin = record.origin if record is not None else ""
        if self._router is not None and request.spec.params.seed is None:
            # Cores would all draw the same seeds.
            request.seed = self._random.getrandbits(63)
        stream = RequestStream(self.abort, self._outputs.add(request, text), request)
        replica = self._place(stream)
        if replica is not None:
            replica.link.send(request)
            if self._router is not None:
                replica.probe(time.monotonic())  # one that hangs is passed over from then on
        self._streams[request.id] = stream
        self._waiting[request.id] = request.spec.num_prompt_tokens
        self.num_waiting_tokens += request.spec.num_prompt_tokens
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

    def _place(self, stream: RequestStream) -> Replica | None:
        """Chooses the core that a request goes to; None while none runs."""
        if self._router is None:
            [only] = self.replicas
            stream.replica = only if only.runs else None
            return stream.replica
        if stream.share is not None:
            self._router.end(stream.share)
        stream.share = stream.replica = None
        live = [replica for replica in self.replicas if replica.runs]
        running = [one.index for one in [one for one in live if one.is_trusted] or live]
        if running:
            caches = self.config.cache.enable_prefix_caching
            stream.share = self._router.place(stream.request.spec, running, caches=caches)
            stream.replica = self.replicas[stream.share.core]
        return stream.replica

    def _go_on(self, stream: RequestStream) -> None:
        """Has a request computed by another core: from its prompt and the tokens that it has, so that its reader sees no more
        than a pause. While none runs, it waits.
        """
        replica = self._place(stream)
        if replica is not None:
            begun = any(sequence.token_ids for sequence in stream.state.sequences)
            if begun and stream.share is not None and self._router is not None:
                self._router.computed(stream.share)  # nobody tells when it is computed once more
            for sequence in stream.state.sequences:
                if not sequence.finished:
                    replica.link.send(_remainder(stream.request, sequence, self._client))

    def _end(self, request_id: str) -> list[SequenceState]:
        """Forgets a request and has the core end it; those of its sequences that were still running."""
        stream = self._drop(request_id)
        state = self._outputs.remove(request_id)
        if stream is None or state is None:
            return []
        running = [sequence for sequence in state.sequences if not sequence.finished]
        for _ in running:
            self.metrics_of(stream).count_finished("abort")
        if stream.replica is not None:
            stream.replica.send(Abort([sequence.number for sequence in running], self._client))
        return running

    async def live_requests(self) -> RequestList:
        """Every request that the engine has, whoever asked for it. Raises ServerUnavailableError when the engine does
        not answer.
        """
        return await self._ask(ListRequests)

    async def end_requests(self, id: str) -> RequestList:
        """Ends the requests with this id, whoever asked for them; their clients see the finish reason "abort". Raises
        ServerUnavailableError when the engine does not answer.
        """
        return await self._ask(lambda client, ticket: EndRequests(id, client, ticket))

    async def _ask(self, question: Question) -> RequestList:
        """What all cores that run answer together. One that is silent is left out where the others have something to tell."""
        if self.dead is not None:
            raise self.dead
        running = [replica for replica in self.replicas if replica.runs]
        if not running:
            raise ServerUnavailableError("The engine died and is being started again.")
        asked = (replica.ask(question) for replica in running)
        found = await asyncio.gather(*asked, return_exceptions=True)
        told = [answer for answer in found if isinstance(answer, RequestList)]
        failures = [error for error in found if isinstance(error, BaseException)]
        if failures and not any(answer.requests for answer in told):
            raise failures[0]
        requests = sorted(
            (one for answer in told for one in answer.requests), key=lambda one: -one.age
        )
        return RequestList(0, requests, sum(answer.kv_cache_usage for answer in told) / len(told))

    def reset_prefix_cache(self) -> None:
        """Forgets the cached beginnings of prompts. Each core tells all of its front ends when it has."""
        for replica in self.replicas:
            replica.send(ResetPrefixCache())

    @property
    def stats(self) -> EngineStats:
        """What the cores' last steps told, together."""
        return total([replica.stats for replica in self.replicas])

    @property
    def num_cores(self) -> int:
        """Those that run, or will: at least one."""
        return max(1, sum(replica.dead is None for replica in self.replicas))

    @property
    def max_num_running(self) -> int:
        """Requests that run at once, at most."""
        return self.config.scheduler.max_num_seqs * self.num_cores

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
        """Ends the cores; requests still running get an error."""
        readers = [replica.reader for replica in self.replicas if replica.reader is not None]
        for reader in readers:
            reader.cancel()
        if readers:
            await asyncio.wait(readers)  # they may be starting other cores
        self._fail_all(self.dead or EngineDeadError("The engine was shut down."))
        await asyncio.gather(*(replica.link.stop() for replica in self.replicas if replica.linked))

    async def _read(self, replica: Replica) -> None:
        while replica.dead is None:
            try:
                await self._take_all(replica)
            except Exception as cause:
                if replica.reviver is None:
                    raise
                gone = [
                    one.index
                    for one in self.replicas
                    if one.runs and (one is replica or one.link.ended)
                ]
                self.pause(*gone)
                num_waiting = sum(stream.replica is None for stream in self._streams.values())
                try:
                    core, info = await replica.reviver.another(cause, num_waiting)
                except EngineDeadError as error:
                    self.lose(replica.index, error)
                    if self.dead is None:
                        logger.error("%s", replica.dead)
                else:
                    self.resume(replica.index, core, info)

    async def _take_all(self, replica: Replica) -> None:
        """Takes in what a core sends. Raises what ended it."""
        link = replica.link
        while True:
            for message in await link.receive():
                if isinstance(message, EngineOutputs):
                    self.take(message, replica)
                elif isinstance(message, Forgotten):
                    if self._router is not None:
                        self._router.forget_prompts(replica.index)
                else:
                    replica.take(message)

    def pause(self, *indices: int) -> None:
        """Cores have died; others will come in their places. Their requests go on with the other cores at once or, when none
        runs, with the first that comes; those that have seen too many die end. Those that are known to have died together are
        to be told together: no request is sent to one of them then.
        """
        gone = [self.replicas[index] for index in indices if self.replicas[index].runs]
        for replica in gone:
            replica.disconnect()
        for stream in [stream for stream in self._streams.values() if stream.replica in gone]:
            stream.num_deaths += 1
            if stream.num_deaths <= MAX_RESUMES:
                self._go_on(stream)
                continue
            error = f"the engine has died {stream.num_deaths} times while this request was running"
            stream.fail(EngineError(f"The request could not be finished: {error}."))
            self._forget(stream, "error")

    def resume(self, index: int, link: CoreLink, info: WorkerInfo) -> None:
        """Another core has come in the place of one that died. Requests that wait for one go on."""
        self._connect(index, link, info)
        if link.client == 0:
            self.replicas[index].metrics.count_restart()
        for stream in self._streams.values():
            if stream.replica is None:
                self._go_on(stream)

    def lose(self, index: int, error: EngineDeadError) -> None:
        """No other core comes in the place of one that died: the others go on without it. Was it the last one, every
        request ends with this error, and so does every one that comes.
        """
        self.replicas[index].dead = without_it(error)
        if self.replicas[index].linked:
            self.replicas[index].link.kill()
        if all(one.dead is not None for one in self.replicas):
            self.dead = error
            self._fail_all(error)
            self.died.set()

    def observe_loads(self, num_sequences: Sequence[int]) -> None:
        """Takes in how many sequences each core has, where there are other front ends."""
        if self._router is not None:
            self._router.observe(num_sequences)

    async def check(self) -> None:
        """Returns when all cores are well: each has made a step lately, or makes one now. One that is being started again is
        missed by nobody while another is well. Raises ServerUnavailableError, EngineDeadError when one is gone for good.
        """
        if self.dead is not None:
            raise self.dead
        found = await asyncio.gather(
            *(one.check() for one in self.replicas), return_exceptions=True
        )
        missed = [
            error
            for replica, error in zip(self.replicas, found, strict=True)
            if error is not None and (None not in found or replica.runs or replica.dead is not None)
        ]
        if missed:
            raise missed[0]

    async def check_some(self) -> None:
        """Returns when one core is well. Raises as `check`."""
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
        raise self.dead or failures[0]

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
        self._drop(stream.state.id)
        self.metrics_of(stream).count_finished(reason)

    def _drop(self, request_id: str) -> RequestStream | None:
        """Takes a request off the books."""
        stream = self._streams.pop(request_id, None)
        self._waits_no_more(request_id)
        if stream is not None and stream.share is not None and self._router is not None:
            self._router.end(stream.share)
        return stream

    def _waits_no_more(self, request_id: str) -> None:
        self.num_waiting_tokens -= self._waiting.pop(request_id, 0)

    def metrics_of(self, stream: RequestStream) -> Metrics:
        """Those of the core that has a request."""
        return self.metrics if stream.replica is None else stream.replica.metrics

    def take(self, message: EngineOutputs, replica: Replica) -> None:
        """Gives what a step of a core brought to the streams."""
        now = time.monotonic()
        metrics = replica.metrics
        replica.note_step(message, now)
        if message.stats is not None:
            observe_step(metrics, message.stats)
        for number in message.scheduled:
            sequence = self._outputs.find(number)
            stream = self._streams.get(sequence.request.id) if sequence is not None else None
            if stream is not None and not stream.scheduled:
                stream.scheduled = message.scheduled_at
                self._waits_no_more(stream.state.id)
                metrics.queue_time.observe(max(0.0, stream.scheduled - stream.arrival))
        done = self._outputs.process(message, now)
        num_tokens = len(done.begun)
        for last, count in done.gaps.items():
            metrics.inter_token_latency.observe(now - last, count)
            num_tokens += count
        for sequence in done.begun:
            stream = self._streams.get(sequence.request.id)
            if stream is not None and sequence.index == 0:
                observe_begin(metrics, stream, now)
                if stream.share is not None and self._router is not None:
                    self._router.computed(stream.share)
        if num_tokens:
            metrics.generation_tokens.inc(num_tokens)
        for sequence, reason in done.finished:
            replica.note_end(reason, now)
            observe_end(metrics, sequence, self._streams.get(sequence.request.id), reason, now)
            if sequence.request.finished:
                self._drop(sequence.request.id)
        if done.ended:
            replica.send(Abort(done.ended, self._client))


async def find_folders(model: ModelConfig) -> tuple[Path, Path]:
    """The folders of a model and of its tokenizer, fetched where need be. Raises ToolkitError for what the user can
    mend.
    """
    folder = await asyncio.to_thread(locate, model.model, model.revision)
    if model.tokenizer is None:
        return folder, folder
    return folder, await asyncio.to_thread(locate_tokenizer, model.tokenizer)


def _remainder(request: EngineRequest, sequence: SequenceState, client: int) -> EngineRequest:
    """Return a request for the part of one sequence that is not computed yet."""
    return msgspec.structs.replace(
        request,
        client=client,
        number=sequence.number,
        index=sequence.index,
        output_token_ids=sequence.token_ids,
        num_prompt_logprobs=sequence.request.num_prompt_logprobs,
    )
