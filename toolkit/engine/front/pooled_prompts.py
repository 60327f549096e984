"""Prompts that are pooled instead of continued: requests from texts, embeddings and scores.

A pooled prompt is a request that ends with its prompt. Its last step returns a vector instead of a
token, in the only EngineOutput of the sequence. A decoder computes the prompt in chunks, among
other requests, and keeps the partial result by row (`pooling.accumulator`). An encoder has no cache
and computes complete prompts (`worker.encoder_runner`); the scheduler is the same, with one block
per request and `chunks_prompts` off."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from toolkit.engine.front.input_processor import InputProcessor
from toolkit.engine.messages import EngineRequest
from toolkit.errors import ContextLengthError, EngineError, InvalidRequestError
from toolkit.metrics import Metrics
from toolkit.pooling.settings import PoolingInfo
from toolkit.sampling.params import PoolingParams, SamplingParams
from toolkit.sequence import SequenceSpec

if TYPE_CHECKING:
    from toolkit.engine.async_llm import AsyncLLM
    from toolkit.engine.front.stream import RequestStream

Vector = npt.NDArray[np.float32]
STEPS_AHEAD = 2
"""Steps of tokens that one call keeps in the engine: enough to fill the next step, and few enough
that other requests run in between."""
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
"""The engine ends a pooling request after its first token."""


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """A checked prompt."""

    token_ids: array[int]
    params: PoolingParams

    def request(self, id: str, priority: int = 0) -> EngineRequest:
        return EngineRequest(
            id=id,
            spec=SequenceSpec(
                prompt_token_ids=self.token_ids.tolist(),
                params=_PARAMS,
                max_tokens=1,
                eos_token_ids=[],
                priority=priority,
                pooling=self.params,
            ),
        )


@dataclass(slots=True)
class EmbeddingOutput:
    """Embedding of one text."""

    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """Result of `LLM.embed` for one prompt. The fields follow vLLM's."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput


@dataclass(slots=True)
class ScoringOutput:
    """Score of a pair of texts."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """Result of `LLM.score` for one pair. The fields follow vLLM's."""

    request_id: str
    outputs: ScoringOutput


@dataclass(frozen=True, slots=True)
class Comparison:
    """Pairs of texts to score."""

    inputs: list[PoolingInput]
    num_firsts: int | None  # inputs that are first texts; None: each input is a pair

    def compute_scores(self, vectors: list[Vector]) -> list[float]:
        """Return one score for each pair. `vectors`: those of the inputs."""
        if self.num_firsts is None:
            return [float(vector[0]) for vector in vectors]
        return cosine_similarities(
            np.stack(vectors[: self.num_firsts]), np.stack(vectors[self.num_firsts :])
        )


class PoolingProcessor:
    """Tokenizes and checks pooled prompts. The engine core accepts all that pass."""

    def __init__(self, inputs: InputProcessor) -> None:
        self._inputs = inputs

    def require_task(self, *tasks: str) -> PoolingInfo:
        """Return the pooling settings. Raises InvalidRequestError if the model has no such task."""
        info = self._inputs.info.pooling
        if info is not None and info.task in tasks:
            return info
        self._inputs.require_text("model")
        if info is None:
            raise InvalidRequestError(
                "This model generates text and has no embeddings of its own. Start the server with "
                "--pooling last (or mean) to serve /v1/embeddings as well, or serve an embedding "
                "model.",
                param="model",
            )
        what = {
            "embed": "embeds texts, and has no labels",
            "score": "scores pairs of texts, and has no embeddings",
            "classify": "classifies texts, and has no embeddings",
        }[info.task]
        raise InvalidRequestError(f"This model {what}. It serves {info.paths}.", param="model")

    def embedding_size(self, dimensions: int | None) -> int:
        """Return the size of an embedding. Raises InvalidRequestError for an unsupported size."""
        info = self.require_task("embed")
        if dimensions is None or dimensions == info.size:
            return info.size
        if not 1 <= dimensions <= info.size:
            raise InvalidRequestError(
                f"dimensions must be from 1 to {info.size}; got {dimensions}.",
                param="dimensions",
            )
        if info.dimensions is None:
            raise InvalidRequestError(
                f"This model's embeddings have {info.size} dimensions and were not trained to be "
                'cut (Matryoshka). If they were, set "is_matryoshka": true in its config.json.',
                param="dimensions",
            )
        if info.dimensions and dimensions not in info.dimensions:
            raise InvalidRequestError(
                f"dimensions must be one of {', '.join(map(str, info.dimensions))}; "
                f"got {dimensions}.",
                param="dimensions",
            )
        return dimensions

    def truncate(self, vector: Vector, size: int) -> Vector:
        """Cut an embedding to its first numbers. Normalizes it again if the model normalizes."""
        info = self._inputs.info.pooling
        if size == len(vector) or info is None:
            return vector
        return normalize(vector[:size]) if info.normalizes else vector[:size]

    def prepare_texts(
        self, given: Sequence[str | list[int]], truncate: int | None, param: str = "input"
    ) -> list[PoolingInput]:
        """Check texts or token ids.

        `truncate`: tokens to keep of each, -1: the model's maximum. Raises InvalidRequestError for
        one that is empty, too long, or has a token outside the vocabulary."""
        max_tokens = self._max_tokens(truncate)
        return [
            self._prepare_text((one,), max_tokens, _item_name(param, i, given))
            if isinstance(one, str)
            else self._prepare_tokens(one, max_tokens, _item_name(param, i, given))
            for i, one in enumerate(given)
        ]

    def _prepare_pairs(
        self, firsts: Sequence[str], seconds: Sequence[str], truncate: int | None, param: str
    ) -> list[PoolingInput]:
        """Check pairs of texts, each as one prompt. `param`: name of the second texts in errors."""
        max_tokens = self._max_tokens(truncate)
        return [
            self._prepare_text(pair, max_tokens, _item_name(param, i, seconds))
            for i, pair in enumerate(zip(firsts, seconds, strict=True))
        ]

    def prepare_comparison(
        self, firsts: list[str], seconds: list[str], truncate: int | None, names: tuple[str, str]
    ) -> Comparison:
        """Pair each first text with its second one, or a single first text with every second one.

        `names`: their names in errors. Raises InvalidRequestError, also for counts that do not
        match."""
        info = self.require_task("embed", "score")
        for texts, name in zip((firsts, seconds), names, strict=True):
            if not texts:
                raise InvalidRequestError(f"{name} is empty.", param=name)
        if len(firsts) not in (1, len(seconds)):
            raise InvalidRequestError(
                f"{names[0]} has {len(firsts)} texts and {names[1]} has {len(seconds)}. "
                f"{names[0]} must have one text, or one for each of {names[1]}.",
                param=names[0],
            )
        if info.task == "score":
            every = firsts * len(seconds) if len(firsts) == 1 else firsts
            return Comparison(self._prepare_pairs(every, seconds, truncate, names[1]), None)
        inputs = [
            *self.prepare_texts(firsts, truncate, names[0]),
            *self.prepare_texts(seconds, truncate, names[1]),
        ]
        return Comparison(inputs, len(firsts))

    def _max_tokens(self, truncate: int | None) -> int | None:
        limit = self._inputs.info.max_model_len
        if truncate is None:
            return None
        if truncate != -1 and not 1 <= truncate <= limit:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be from 1 to {limit}, the model's maximum, or -1 for "
                f"the maximum; got {truncate}.",
                param="truncate_prompt_tokens",
            )
        return limit if truncate == -1 else truncate

    def _prepare_text(
        self, texts: tuple[str, ...], max_tokens: int | None, name: str
    ) -> PoolingInput:
        # A token has few characters, so extremely long text is not tokenized.
        max_chars = 64 * self._inputs.info.max_model_len + 4096
        size = sum(map(len, texts))
        if max_tokens is None and size > max_chars:
            raise ContextLengthError(self._inputs.info.max_model_len, name, size, "characters")
        tokenizer = self._inputs.require_tokenizer()
        token_ids, second = tokenizer.encode_texts(
            tuple(text[:max_chars] for text in texts), max_tokens
        )
        return self._make_input(token_ids, PoolingParams(second), name)

    def _prepare_tokens(
        self, token_ids: list[int], max_tokens: int | None, name: str
    ) -> PoolingInput:
        token_ids = token_ids[:max_tokens]
        vocab_size = self._inputs.info.vocab_size
        wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"{name} contains token {wrong}. Valid tokens are 0 to {vocab_size - 1}.",
                param=name,
            )
        return self._make_input(token_ids, PoolingParams(), name)

    def _make_input(self, token_ids: list[int], params: PoolingParams, name: str) -> PoolingInput:
        if not token_ids:
            raise InvalidRequestError(f"{name} is empty.", param=name)
        if len(token_ids) > self._inputs.info.max_model_len:
            raise ContextLengthError(self._inputs.info.max_model_len, name, len(token_ids))
        return PoolingInput(array("i", token_ids), params)


async def pool(
    engine: AsyncLLM, inputs: Sequence[PoolingInput], *, request_id: str, priority: int = 0
) -> list[Vector]:
    """Return the vectors of prompts, in order. Cancelling ends the requests. Raises EngineError."""
    max_tokens = STEPS_AHEAD * engine.info.max_num_batched_tokens * engine.num_cores
    vectors: list[Vector] = []
    computed: Counter[Metrics] = Counter()
    running: deque[tuple[RequestStream, int]] = deque()
    num_tokens = 0
    held_back = sum(len(one.token_ids) for one in inputs)

    async def finish_oldest() -> int:
        """Wait for the oldest request. Returns the length of its prompt."""
        stream, size = running[0]
        vectors.append(await _receive_vector(stream))
        computed[engine.metrics_of(stream)] += size
        running.popleft()
        return size

    engine.num_waiting_tokens += held_back
    try:
        for index, one in enumerate(inputs):
            while running and num_tokens + len(one.token_ids) > max_tokens:
                num_tokens -= await finish_oldest()
            stream = engine.start_request(one.request(f"{request_id}-{index}", priority))
            running.append((stream, len(one.token_ids)))
            num_tokens += len(one.token_ids)
            held_back -= len(one.token_ids)
            engine.num_waiting_tokens -= len(one.token_ids)
        while running:
            await finish_oldest()
    finally:
        engine.num_waiting_tokens -= held_back
        for stream, _ in running:
            stream.close()
    for metrics, size in computed.items():
        metrics.prompt_tokens.inc(size)
    return vectors


def num_concurrent(engine: AsyncLLM, inputs: Sequence[PoolingInput]) -> int:
    """Return the number of inputs that `pool` starts before any is finished."""
    max_tokens = STEPS_AHEAD * engine.info.max_num_batched_tokens * engine.num_cores
    ends = itertools.accumulate(len(one.token_ids) for one in inputs)
    return max(1, sum(1 for end in ends if end <= max_tokens))


async def _receive_vector(stream: RequestStream) -> Vector:
    """Return the vector of a pooled prompt."""
    delta = await anext(stream)
    if not delta.embedding:
        raise EngineError("The request ended before its vector was computed.")
    return as_vector(delta.embedding)


def as_vector(embedding: bytes) -> Vector:
    """Decode a vector [size] of an engine's message."""
    return np.frombuffer(embedding, np.float32)


def normalize(vectors: Vector) -> Vector:
    """Scale vectors [..., size] to length 1."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit: Vector = vectors / np.maximum(lengths, 1e-12)
    return unit


def cosine_similarities(firsts: Vector, seconds: Vector) -> list[float]:
    """Return cosines between firsts [n, size] (or [1, size]) and seconds [n, size]."""
    cosines: list[float] = (normalize(firsts) * normalize(seconds)).sum(axis=1).tolist()
    return cosines


def _item_name(param: str, index: int, given: Sequence[object]) -> str:
    """Return the name of an input in errors."""
    return param if len(given) == 1 else f"{param}[{index}]"
