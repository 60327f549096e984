"""Prompts that are pooled, and not continued: from texts to requests, and from vectors to embeddings and scores."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from toolkit.engine.input_processor import InputProcessor
from toolkit.engine.messages import EngineRequest
from toolkit.errors import EngineError, InvalidRequestError
from toolkit.metrics import Metrics
from toolkit.pooling.settings import PoolingInfo
from toolkit.sampling.params import PoolingParams, SamplingParams
from toolkit.sequence import SequenceSpec

if TYPE_CHECKING:
    from toolkit.engine.async_llm import AsyncLLM
    from toolkit.engine.stream import RequestStream

Vector = npt.NDArray[np.float32]
STEPS_AHEAD = 2
"""Steps' worth of tokens that one call has in the engine at once: enough to fill the next step, and little enough that
others' requests come between.
"""
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
"""The engine ends such a request with the first token that it samples."""


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """A prompt, checked."""

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
    """One text's vector."""

    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """What `LLM.embed` makes of one prompt. The shape is vLLM's."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts fit."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """What `LLM.score` makes of one pair. The shape is vLLM's."""

    request_id: str
    outputs: ScoringOutput


@dataclass(frozen=True, slots=True)
class Comparison:
    """Pairs of texts to score. `num_firsts`: how many of the inputs are first texts; None: each input is a pair."""

    inputs: list[PoolingInput]
    num_firsts: int | None

    def scores(self, vectors: list[Vector]) -> list[float]:
        """One for each pair. `vectors`: those of the inputs."""
        if self.num_firsts is None:
            return [float(vector[0]) for vector in vectors]
        return cosines(np.stack(vectors[: self.num_firsts]), np.stack(vectors[self.num_firsts :]))


class PoolingProcessor:
    """Checks are made here, once, so that the engine core takes every request it gets."""

    def __init__(self, inputs: InputProcessor) -> None:
        self._inputs = inputs

    def require(self, *tasks: str) -> PoolingInfo:
        """Raises InvalidRequestError when the model does none of these tasks, saying what to do."""
        info = self._inputs.info.pooling
        if info is not None and info.task in tasks:
            return info
        if info is None:
            raise InvalidRequestError(
                "This model generates text, and its folder says nothing of embeddings. Start the server with --pooling "
                "last (or mean) to have it answer /v1/embeddings, too, or serve an embedding model.",
                param="model",
            )
        raise InvalidRequestError(
            "This model scores pairs of texts and has no embeddings: it answers /v1/score and /v1/rerank.",
            param="model",
        )

    def size(self, dimensions: int | None) -> int:
        """Numbers in an embedding. Raises InvalidRequestError for a size that it cannot be cut to."""
        info = self.require("embed")
        if dimensions is None or dimensions == info.size:
            return info.size
        if not 1 <= dimensions <= info.size:
            raise InvalidRequestError(
                f"dimensions is from 1 to {info.size}; it got {dimensions}.", param="dimensions"
            )
        if info.dimensions is None:
            raise InvalidRequestError(
                f"This model's embeddings have {info.size} numbers and were not made to be cut (Matryoshka). If yours were, "
                f'say "is_matryoshka": true in its config.json.',
                param="dimensions",
            )
        if info.dimensions and dimensions not in info.dimensions:
            raise InvalidRequestError(
                f"dimensions is one of {', '.join(map(str, info.dimensions))}; it got {dimensions}.",
                param="dimensions",
            )
        return dimensions

    def cut(self, vector: Vector, size: int) -> Vector:
        """The first numbers of an embedding, with the length 1 if it had that."""
        info = self._inputs.info.pooling
        if size == len(vector) or info is None:
            return vector
        return normalized(vector[:size]) if info.normalizes else vector[:size]

    def texts(
        self, given: Sequence[str | list[int]], truncate: int | None, param: str = "input"
    ) -> list[PoolingInput]:
        """Texts or token ids, each as a prompt. `truncate`: the most tokens that are kept of each, -1: as many as the model
        takes. Raises InvalidRequestError for one that is empty, too long, or has a token outside the vocabulary.
        """
        most = self._most(truncate)
        return [
            self._text((one,), most, _name(param, i, given))
            if isinstance(one, str)
            else self._token_ids(one, most, _name(param, i, given))
            for i, one in enumerate(given)
        ]

    def _pairs(
        self, firsts: Sequence[str], seconds: Sequence[str], truncate: int | None, param: str
    ) -> list[PoolingInput]:
        """Pairs of texts, each as one prompt. As `texts`; `param` names the second ones."""
        most = self._most(truncate)
        return [
            self._text(pair, most, _name(param, i, seconds))
            for i, pair in enumerate(zip(firsts, seconds, strict=True))
        ]

    def comparison(
        self, firsts: list[str], seconds: list[str], truncate: int | None, names: tuple[str, str]
    ) -> Comparison:
        """Each first text with its second one; one first text is compared with every second one. `names`: what errors call
        them. Raises InvalidRequestError for numbers that do not match, and as `texts` does.
        """
        info = self.require("embed", "score")
        for texts, name in zip((firsts, seconds), names, strict=True):
            if not texts:
                raise InvalidRequestError(f"{name} is empty.", param=name)
        if len(firsts) not in (1, len(seconds)):
            raise InvalidRequestError(
                f"{names[0]} has {len(firsts)} texts and {names[1]} has {len(seconds)}: give one for all, or one for each.",
                param=names[0],
            )
        if info.task == "score":
            every = firsts * len(seconds) if len(firsts) == 1 else firsts
            return Comparison(self._pairs(every, seconds, truncate, names[1]), None)
        inputs = [*self.texts(firsts, truncate, names[0]), *self.texts(seconds, truncate, names[1])]
        return Comparison(inputs, len(firsts))

    def _most(self, truncate: int | None) -> int | None:
        limit = self._inputs.info.max_model_len
        if truncate is None:
            return None
        if truncate != -1 and not 1 <= truncate <= limit:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is from 1 to {limit}, which the model takes, or -1 for that; it got {truncate}.",
                param="truncate_prompt_tokens",
            )
        return limit if truncate == -1 else truncate

    def _text(self, texts: tuple[str, ...], most: int | None, name: str) -> PoolingInput:
        # A token is at most a handful of characters: the absurd is not tokenized.
        sane = 64 * self._inputs.info.max_model_len + 4096
        size = sum(map(len, texts))
        if most is None and size > sane:
            raise self._too_long(name, f"{size} characters")
        tokenizer = self._inputs.require_tokenizer()
        token_ids, second = tokenizer.encode_texts(tuple(text[:sane] for text in texts), most)
        return self._checked(token_ids, PoolingParams(second), name)

    def _token_ids(self, token_ids: list[int], most: int | None, name: str) -> PoolingInput:
        token_ids = token_ids[:most]
        vocab_size = self._inputs.info.vocab_size
        wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"{name} has the token {wrong}, and the model's tokens are 0 to {vocab_size - 1}.",
                param=name,
            )
        return self._checked(token_ids, PoolingParams(), name)

    def _checked(self, token_ids: list[int], params: PoolingParams, name: str) -> PoolingInput:
        if not token_ids:
            raise InvalidRequestError(f"{name} is empty.", param=name)
        if len(token_ids) > self._inputs.info.max_model_len:
            raise self._too_long(name, f"{len(token_ids)} tokens")
        return PoolingInput(array("i", token_ids), params)

    def _too_long(self, name: str, size: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"{name} has {size}, and the model takes at most {self._inputs.info.max_model_len} tokens. Shorten it, or have it "
            f"cut: truncate_prompt_tokens -1.",
            param=name,
            code="context_length_exceeded",
        )


async def pooled(
    engine: AsyncLLM, inputs: Sequence[PoolingInput], *, request_id: str, priority: int = 0
) -> list[Vector]:
    """The vectors of prompts, in their order. When this is cancelled, what still runs is ended. Raises EngineError."""
    most = STEPS_AHEAD * engine.info.max_num_batched_tokens * engine.num_cores
    vectors: list[Vector] = []
    computed: Counter[Metrics] = Counter()
    running: deque[tuple[RequestStream, int]] = deque()
    num_tokens = 0
    held_back = sum(len(one.token_ids) for one in inputs)

    async def take() -> int:
        """Waits for the first of those that run; the tokens of its prompt."""
        stream, size = running[0]
        vectors.append(await _vector(stream))
        computed[engine.metrics_of(stream)] += size
        running.popleft()
        return size

    engine.num_waiting_tokens += held_back
    try:
        for index, one in enumerate(inputs):
            while running and num_tokens + len(one.token_ids) > most:
                num_tokens -= await take()
            stream = engine.begin(one.request(f"{request_id}-{index}", priority))
            running.append((stream, len(one.token_ids)))
            num_tokens += len(one.token_ids)
            held_back -= len(one.token_ids)
            engine.num_waiting_tokens -= len(one.token_ids)
        while running:
            await take()
    finally:
        engine.num_waiting_tokens -= held_back
        for stream, _ in running:
            stream.close()
    for metrics, size in computed.items():
        metrics.prompt_tokens.inc(size)
    return vectors


def num_at_once(engine: AsyncLLM, inputs: Sequence[PoolingInput]) -> int:
    """How many of the inputs `pooled` begins before any is done."""
    most = STEPS_AHEAD * engine.info.max_num_batched_tokens * engine.num_cores
    ends = itertools.accumulate(len(one.token_ids) for one in inputs)
    return max(1, sum(1 for end in ends if end <= most))


async def _vector(stream: RequestStream) -> Vector:
    """The one thing that comes of a pooled prompt."""
    delta = await anext(stream)
    if not delta.embedding:
        raise EngineError("The request was ended before its vectors were there.")
    return as_vector(delta.embedding)


def as_vector(embedding: bytes) -> Vector:
    """[size], of an engine's message."""
    return np.frombuffer(embedding, np.float32)


def normalized(vectors: Vector) -> Vector:
    """Vectors [..., size] with the length 1."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    whole: Vector = vectors / np.maximum(lengths, 1e-12)
    return whole


def cosines(firsts: Vector, seconds: Vector) -> list[float]:
    """Of the angles between firsts [n, size] (or [1, size]) and seconds [n, size]."""
    found: list[float] = (normalized(firsts) * normalized(seconds)).sum(axis=1).tolist()
    return found


def _name(param: str, index: int, given: Sequence[object]) -> str:
    """How an error calls one of several."""
    return param if len(given) == 1 else f"{param}[{index}]"
