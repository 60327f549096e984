"""The engine in the caller's process, for offline work. The interface follows vLLM's."""

import asyncio
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import chain
from typing import Any, TypeVar, cast

import msgspec

from toolkit.config import EngineConfig
from toolkit.engine.beam_search import BeamSearch, first_logprobs
from toolkit.engine.core import EngineCore
from toolkit.engine.cores.several_cores import SeveralCores
from toolkit.engine.front.adapters import AdapterRegistry
from toolkit.engine.front.clips import read_clips, with_clips
from toolkit.engine.front.feature_places import split_features
from toolkit.engine.front.features import FeatureStore
from toolkit.engine.front.input_processor import (
    InputProcessor,
    Prepared,
    Prompt,
    TokensPrompt,
    plain_prompt,
    require_text,
)
from toolkit.engine.front.output_processor import OutputCollector, OutputProcessor, RequestState
from toolkit.engine.front.pictures import (
    Picture,
    PictureImage,
    Pictures,
    PictureUrl,
    check_sources,
    make_pictures,
    pictures_in,
    require_sight,
)
from toolkit.engine.front.pooled_prompts import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingInput,
    PoolingProcessor,
    ScoringOutput,
    ScoringRequestOutput,
    Vector,
    as_vector,
)
from toolkit.engine.local_files import with_local_files
from toolkit.engine.messages import Abort, EngineOutputs, NeedFeature
from toolkit.engine.outputs import Delta, RequestOutput
from toolkit.errors import EngineDeadError, EngineError, InvalidRequestError
from toolkit.executor import Executor, start_executor
from toolkit.hub import locate, locate_tokenizer
from toolkit.sampling.params import BeamSearchParams, SamplingParams
from toolkit.sequence import LoRARequest
from toolkit.text.harmony import HarmonyFormat, content_of, is_harmony
from toolkit.text.tokenizer import Tokenizer, load_tokenizer
from toolkit.worker import Report

Messages = list[dict[str, Any]]
NUM_HASHERS = 16  # threads at most that copy pictures and compute their digests
T = TypeVar("T")


class LLM:
    """A loaded model.

    >>> llm = LLM("gpt2", max_num_seqs=64)
    >>> llm.generate(["The sea is"], SamplingParams(max_tokens=8))[0].outputs[0].text
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        executor: Executor | None = None,
        report: Report | None = None,
        **settings: Any,
    ) -> None:
        """Load a model: a folder, a hub name, or (None) the demo model.

        `settings` are the flags of `tk serve`, with underscores; `config` replaces them. `executor`
        replaces the one that would be created. `report` is called with the name and seconds of each
        start-up phase. Raises ToolkitError."""
        self.config = config or EngineConfig.from_settings({"model": model, **settings})
        check_sources(self.config.pictures)
        wanted = self.config.model
        self.folder = locate(wanted.model, wanted.revision)
        tokenizer_folder = self.folder
        if wanted.tokenizer is not None:  # a missing one is reported before the model is loaded
            tokenizer_folder = locate_tokenizer(wanted.tokenizer)
        report = report or (lambda name, seconds: None)
        config = with_local_files(self.config)
        self._core: EngineCore | SeveralCores
        if self.config.parallel.data_parallel_size > 1 and executor is None:
            self._core = SeveralCores(config, self.folder, report)
        else:
            executor = executor or start_executor(config, self.folder, report)
            self._core = EngineCore(config, executor, lambda: self.tokenizer)
        self._is_shut_down = False
        self.info = self._core.info
        self.adapters = AdapterRegistry(config.lora)
        self.adapters.start(self.info.adapters)
        self.tokenizer = load_tokenizer(tokenizer_folder, wanted.chat_template)
        self._inputs = InputProcessor(self.folder, self.tokenizer, self.info, wanted)
        self._pooling = PoolingProcessor(self._inputs)
        self._outputs = OutputProcessor(self.tokenizer)
        self._features = FeatureStore()
        self._loading: dict[bytes, Future[bytes]] = {}  # features that the core asked for
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts of any lengths together. Results are in the order of the prompts.

        `sampling_params`, `lora_request`: one for all prompts, or one per prompt. `use_tqdm`: show
        progress on a terminal. Raises InvalidRequestError before anything runs if a prompt is
        invalid, and EngineError if a request failed."""
        many = _as_list(prompts)
        if self.info.hears:
            many = with_clips(many)
        params = self._params_per_prompt(sampling_params, len(many))
        if priority is not None and len(priority) != len(many):
            raise InvalidRequestError(
                f"There are {len(many)} prompts and {len(priority)} priorities."
            )
        adapters = [
            self.adapters.resolve(one) for one in _adapter_per_prompt(lora_request, len(many))
        ]
        pictures = self._pictures_of(many)
        requests = [
            self._inputs.process(
                prompt,
                one,
                request_id=str(next(self._ids)),
                priority=priority[i] if priority else 0,
                is_streamed=False,
                adapter=adapters[i],
                pictures=pictures[i],
            )
            for i, (prompt, one) in enumerate(zip(many, params, strict=True))
        ]
        self._require_one_core(any(one.features for one in requests))
        woken: deque[RequestState] = deque()
        states = [self._submit(one, woken) for one in requests]
        collected = {state.id: OutputCollector.of(state) for state in states}
        progress = _Progress(len(requests)) if use_tqdm else None
        failures = []
        try:
            on_step = progress.add_step if progress is not None else None
            for id, delta in self._run(states, woken, on_step, in_bulk=True):
                collected[id].add(delta)
                if delta.error is not None:
                    failures.append(f"request {id}: {delta.error}")
                if progress is not None and collected[id].output.finished:
                    progress.add_finished()
        finally:
            self._abort(list(collected))
            if progress is not None:
                progress.close()
        if failures:
            raise EngineError(
                f"{len(failures)} of {len(requests)} requests failed. The first: {failures[0]}"
            )
        return [one.output for one in collected.values()]

    def chat(
        self,
        messages: Messages | list[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations. Raises InvalidRequestError if the model has no chat template.

        `template_options`: `tools`, `chat_template`, `add_generation_prompt` and other input of the
        template, each by itself or in a dict `chat_template_kwargs`. The rest is as in `generate`.

        The content of a message may be a list of parts: {"type": "text", "text": ...}; pictures,
        {"type": "image_url", "image_url": {"url": ...}} or {"type": "image", "image": ...} with an
        image of Pillow; and sound, {"type": "audio", "audio": (samples, rate)}.

        In gpt-oss's format, the text of an answer is its content, and `token_ids` have all of it.
        With `skip_special_tokens=False` the text has all of it, too."""
        several = bool(messages) and isinstance(messages[0], list)
        conversations = cast(list[Messages], messages if several else [messages])
        options = _flat_options(template_options)
        prompts = self._chat_inputs(conversations, options)
        params = self._params_per_prompt(sampling_params, len(prompts))
        template = options.get("chat_template")
        tokenizer = self._inputs.require_tokenizer()
        source = tokenizer.find_template(template) if template else tokenizer.chat_template_text
        if not is_harmony(source):
            return self.generate(prompts, params, use_tqdm=use_tqdm, lora_request=lora_request)
        with_marks = [
            msgspec.structs.replace(
                one, skip_special_tokens=False, spaces_between_special_tokens=False
            )
            if one.skip_special_tokens
            else one
            for one in params
        ]
        results = self.generate(prompts, with_marks, use_tqdm=use_tqdm, lora_request=lora_request)
        for result, asked in zip(results, params, strict=True):
            if asked.skip_special_tokens:
                _keep_content(result, tokenizer)
        return results

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[RequestOutput]:
        """Return the `beam_width` best completions of each prompt by beam search, best first.

        Each has its `cumulative_logprob`. Raises InvalidRequestError."""
        prompt_params = SamplingParams(
            max_tokens=params.max_tokens, stop_token_ids=params.stop_token_ids
        )
        many = _as_list(prompts)
        checked = [
            self._inputs.process(prompt, prompt_params, pictures=pictures)
            for prompt, pictures in zip(many, self._pictures_of(many), strict=True)
        ]
        require_text(checked)
        searches = [
            BeamSearch(one.request.spec, params, self.config.model.max_logprobs) for one in checked
        ]
        while running := [search for search in searches if not search.is_finished]:
            beams: list[Prompt] = [beam for search in running for beam in search.prompts]
            outputs = iter(self.generate(beams, running[0].step_params, use_tqdm=False))
            for search in running:
                search.advance([first_logprobs(next(outputs)) for _ in search.prompts])
        return [
            RequestOutput(
                request.id,
                text,
                request.spec.prompt_token_ids,
                search.best(params.beam_width, self.tokenizer),
                finished=True,
            )
            for (text, request, _), search in zip(checked, searches, strict=True)
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of texts or token ids.

        `dimensions`: length to cut vectors to, if the model was trained for it.
        `truncate_prompt_tokens`: tokens to keep of each prompt, -1: the model's maximum. Raises
        InvalidRequestError if the model has no embeddings, or a text is empty or too long."""
        size = self._pooling.embedding_size(dimensions)
        given = [plain_prompt(prompt) for prompt in _as_list(prompts)]
        inputs = self._pooling.prepare_texts(given, truncate_prompt_tokens)
        return [
            EmbeddingRequestOutput(
                str(i),
                one.token_ids.tolist(),
                EmbeddingOutput(self._pooling.truncate(vector, size).tolist()),
            )
            for i, (one, vector) in enumerate(zip(inputs, self._pool(inputs), strict=True))
        ]

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score each query with its document, or one query with each document.

        The score is a cross-encoder's output, else the cosine similarity of embeddings. Raises
        InvalidRequestError."""
        firsts = [queries] if isinstance(queries, str) else list(queries)
        seconds = [documents] if isinstance(documents, str) else list(documents)
        job = self._pooling.prepare_comparison(
            firsts, seconds, truncate_prompt_tokens, ("queries", "documents")
        )
        scores = job.compute_scores(self._pool(job.inputs))
        return [
            ScoringRequestOutput(str(i), ScoringOutput(score)) for i, score in enumerate(scores)
        ]

    def _pool(self, inputs: Sequence[PoolingInput]) -> list[Vector]:
        """Return the vectors of prompts, in their order."""
        woken: deque[RequestState] = deque()
        asked = [one.request(str(next(self._ids))) for one in inputs]
        states = [self._submit(Prepared(None, one, {}), woken) for one in asked]
        vectors: dict[str, Vector] = {}
        try:
            for id, delta in self._run(states, woken):
                if delta.error is not None:
                    raise EngineError(delta.error)
                vectors[id] = as_vector(delta.embedding)
        finally:
            self._abort([state.id for state in states])
        return [vectors[state.id] for state in states]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[Delta]:
        """Complete one prompt and yield the output as it grows. Leaving the loop early ends it."""
        prepared = self._inputs.process(
            prompt,
            sampling_params or self.get_default_sampling_params(),
            request_id=str(next(self._ids)),
            adapter=self.adapters.resolve(lora_request),
            pictures=self._pictures_of([prompt])[0],
        )
        self._require_one_core(bool(prepared.features))
        woken: deque[RequestState] = deque()
        state = self._submit(prepared, woken)
        try:
            for _, delta in self._run([state], woken):
                if delta.error is not None:
                    raise EngineError(delta.error)
                yield delta
        finally:
            self._abort([state.id])

    def chat_prompt(self, messages: Messages, **template_options: Any) -> list[int]:
        """Return the tokens of a conversation in the model's chat template.

        Those of pictures and sound are included."""
        return self.chat_input(messages, **template_options)["prompt_token_ids"]

    def chat_input(self, messages: Messages, **template_options: Any) -> TokensPrompt:
        """Return the prompt of a conversation: its tokens, and its pictures. See `chat`."""
        return self._chat_inputs([messages], _flat_options(template_options))[0]

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's defaults (generation_config.json), else SamplingParams()."""
        return SamplingParams(**self._inputs.default_sampling)

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, including the special tokens that the tokenizer adds."""
        return self._inputs.require_tokenizer().encode(text)

    def why_eager(self) -> str | None:
        """Return why no step so far replayed a CUDA graph or a recorded step, None if one did.

        Not with a data_parallel_size above 1."""
        assert isinstance(self._core, EngineCore), "other processes run the steps"
        reasons = self._core.executor.collective("why_eager")
        return None if None in reasons else str(reasons[-1])

    def reset_prefix_cache(self) -> None:
        """Evict all cached prompts."""
        self._core.reset_prefix_cache()

    def shutdown(self) -> None:
        """Free the model's memory. Later calls and open streams raise EngineDeadError."""
        self._is_shut_down = True
        self._core.shutdown()
        if self._inputs.pictures is not None:
            self._inputs.pictures.close()

    def _params_per_prompt(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise InvalidRequestError(
                f"There are {count} prompts and {len(params)} sampling parameters."
            )
        return list(params)

    def _require_running(self) -> None:
        if self._is_shut_down:
            raise EngineDeadError("The engine was shut down.")

    def _pictures_of(self, prompts: Sequence[Prompt]) -> list[list[Picture]]:
        """Return the pictures of each prompt, once their sizes are known."""
        images = [
            [PictureImage(image, "multi_modal_data") for image in pictures_in(prompt)]
            for prompt in prompts
        ]
        return self._take(images, "multi_modal_data")

    def _chat_inputs(
        self, conversations: Sequence[Messages], template_options: Mapping[str, Any]
    ) -> list[TokensPrompt]:
        """Return the prompts of conversations. Their pictures are loaded all at once."""
        split = [split_features(messages) for messages in conversations]
        if any(images for _, images, _ in split):
            self._require_sight("messages")  # a text model refuses them, whatever its template
        token_ids = [
            self._inputs.chat_prompt(messages, **template_options) for messages, *_ in split
        ]
        taken = self._take([images for _, images, _ in split], "messages")
        prompts: list[TokensPrompt] = []
        for ids, pictures, (_, _, sounds) in zip(token_ids, taken, split, strict=True):
            if sounds:
                given = {"audio": [one.samples for one in sounds]}
                clips = read_clips(self.info, {"multi_modal_data": given})
                if self.info.sound is not None:
                    ids, _ = self._inputs.place_clips(ids, clips)
                prompts.append({"prompt_token_ids": ids, "multi_modal_data": {"audio": clips}})
            elif pictures:
                ids, _ = self._require_sight().expand(ids, pictures)
                prompts.append({"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}})
            else:
                prompts.append({"prompt_token_ids": ids})
        return prompts

    def _take(
        self, images: Sequence[Sequence[PictureUrl | PictureImage]], param: str
    ) -> list[list[Picture]]:
        """Return the pictures of each prompt, once their sizes are known."""
        if not any(images):
            return [[] for _ in images]
        pictures = self._require_sight()
        for several in images:
            pictures.require_number(len(several), param)
        every = list(chain.from_iterable(images))
        urls = [one for one in every if isinstance(one, PictureUrl)]
        loaded = iter(_run_apart(pictures.resolve(urls, is_checked=False)) if urls else ())

        def take(one: PictureUrl | PictureImage) -> Future[Picture] | None:
            return None if isinstance(one, PictureUrl) else pictures.take(one.image, one.param)

        with ThreadPoolExecutor(min(NUM_HASHERS, os.cpu_count() or 1)) as threads:
            taken = list(threads.map(take, every))
        found = iter([next(loaded) if one is None else one.result() for one in taken])
        return [[next(found) for _ in several] for several in images]

    def _require_sight(self, param: str = "prompt") -> Pictures:
        """Return what prepares pictures; its processes are started for the first one."""
        if self._inputs.pictures is None:
            self._require_one_core(True)
            self._inputs.pictures = make_pictures(
                self.info.sight, self.config.pictures, bytes_in_flight=sys.maxsize
            )
        return require_sight(self._inputs.pictures, self.config.model.model or "tk-demo", param)

    def _require_one_core(self, has_features: bool) -> None:
        """Raise InvalidRequestError if other processes would compute pictures or sound."""
        if has_features and isinstance(self._core, SeveralCores):
            raise InvalidRequestError(
                "LLM takes no pictures and no sound with data_parallel_size above 1. Use a server."
            )

    def _submit(self, prepared: Prepared, woken: deque[RequestState]) -> RequestState:
        """Submit a request. It is appended to `woken` whenever it has a new delta."""
        self._require_running()
        request, text, features = prepared.request, prepared.text, prepared.features
        state = self._outputs.add(request, text)
        state.wake = lambda: woken.append(state)
        self._features.hold(request.id, features)
        self._core.add(request)
        return state

    def _run(
        self,
        states: Sequence[RequestState],
        woken: deque[RequestState],
        on_step: Callable[[EngineOutputs], None] | None = None,
        *,
        in_bulk: bool = False,
    ) -> Iterator[tuple[str, Delta]]:
        """Yield (request id, delta) until all of these requests have ended.

        Several such loops may be open. The output of one loop's requests is kept while another
        runs. `in_bulk`: let deltas grow until a sequence ends, which takes less time per token."""
        unfinished = sum(len(state.sequences) for state in states)
        while unfinished:
            has_ended = not in_bulk
            while not (woken and has_ended):
                has_ended = self._step(on_step) or not in_bulk
            for _ in range(len(woken) if in_bulk else 1):
                state = woken.popleft()
                delta = state.next_delta()
                if delta is not None:
                    unfinished -= delta.finish_reason is not None
                    yield state.id, delta
        while self._core.has_work and not self._outputs.requests:
            self._step(on_step)

    def _step(self, on_step: Callable[[EngineOutputs], None] | None) -> bool:
        """Run a step. Return True if a sequence has ended."""
        self._require_running()
        has_features = self._inputs.pictures is not None or self.info.hears
        if has_features and isinstance(self._core, EngineCore):
            self._give_features(self._core)
        try:
            message = self._core.step()[0]
        except (
            BaseException
        ):  # for example Ctrl-C: a step may have run in part, so the cache must not be trusted
            self._core.drop_steps()
            raise
        changes = self._outputs.process(message, time.monotonic())
        if changes.stopped:
            self._core.abort(Abort(changes.stopped))
        if on_step is not None:
            on_step(message)
        return bool(changes.finished)

    def _give_features(self, core: EngineCore) -> None:
        """Load the features that the core asks for. If no request can run, wait for the next."""
        for _, message in core.pop_messages():
            if isinstance(message, NeedFeature):
                loading = self._features.load(message.digest)
                if loading is None:
                    core.features.receive(message.digest, 0, None)
                else:
                    self._loading[message.digest] = loading
        if self._loading and not core.is_running:
            wait(self._loading.values(), return_when=FIRST_COMPLETED)
        for digest in [digest for digest, one in self._loading.items() if one.done()]:
            loaded = self._loading.pop(digest)
            if (error := loaded.exception()) is not None:
                core.features.receive(digest, 0, None, str(error))
            else:
                core.features.receive(digest, 0, loaded.result())

    def _abort(self, ids: list[str]) -> None:
        """End the requests that are still running."""
        for id in ids:
            self._features.release(id)
            state = self._outputs.remove(id)
            if state is not None and not self._is_shut_down:
                self._core.abort(Abort(state.unfinished_numbers))


def _run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread: that of the caller may have an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


class _Progress:
    """Progress bar on stderr if that is a terminal."""

    def __init__(self, num_requests: int) -> None:
        self._bar = None
        self._num_tokens = 0
        if sys.stderr.isatty():
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
            )

            from toolkit.console import SafeConsole

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[rate]}"),
                console=SafeConsole(stderr=True),
                transient=False,
            )
            self._task = self._bar.add_task("generating", total=num_requests, rate="")
            self._bar.start()

    def add_step(self, message: EngineOutputs) -> None:
        if self._bar is None or message.stats is None:
            return
        self._num_tokens += message.stats.num_sampled
        elapsed = self._bar.tasks[0].elapsed or 0.0
        rate = f"{self._num_tokens / elapsed:,.0f} tok/s" if elapsed > 0.2 else ""
        self._bar.update(self._task, rate=rate)

    def add_finished(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, advance=1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _adapter_per_prompt(
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None, count: int
) -> list[LoRARequest | None]:
    if lora_request is None or isinstance(lora_request, LoRARequest):
        lora_request = [lora_request] * count
    given: object = lora_request
    if isinstance(given, str):
        raise InvalidRequestError(f"lora_request is {given!r}. Pass LoRARequest({given!r}).")
    if len(lora_request) != count:
        raise InvalidRequestError(
            f"There are {count} prompts and {len(lora_request)} LoRA requests."
        )
    return list(lora_request)


def _flat_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return input of a chat template with that in `chat_template_kwargs`."""
    flat = dict(options)
    return {**(flat.pop("chat_template_kwargs", None) or {}), **flat}


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | dict):
        return [prompts]
    many = list(cast(Sequence[Prompt], prompts))
    if many and isinstance(many[0], int):
        return [cast(list[int], many)]
    return many


def _keep_content(result: RequestOutput, tokenizer: Tokenizer) -> None:
    """Reduce answers in harmony to their content."""
    opening = HarmonyFormat.opening_of(result.prompt_token_ids, tokenizer)
    for answer in result.outputs:
        is_cut = answer.finish_reason != "stop" or answer.stop_reason is not None
        answer.text = content_of(answer.text, opening=opening, is_cut=is_cut)
