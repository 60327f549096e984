"""Times of the tokens of a transcript: the engine reads it again, and reports where it attends."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

import numpy as np

from toolkit.engine.front.clips import feature_of, source_of
from toolkit.engine.messages import EngineRequest
from toolkit.errors import EngineError
from toolkit.sampling.params import PoolingParams, SamplingParams
from toolkit.sequence import SequenceSpec
from toolkit.speech.alignment import Span, token_spans
from toolkit.speech.clip import Clip

if TYPE_CHECKING:
    from toolkit.engine.async_llm import AsyncLLM

_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)


class ClipAligner:
    """Finds the times of tokens in clips, with one request for each clip."""

    def __init__(self, engine: AsyncLLM, request_id: str) -> None:
        """`request_id`: beginning of the requests' ids."""
        assert engine.info.hearing is not None, "the model hears"
        self._engine, self._hearing, self._name = engine, engine.info.hearing, request_id

    async def __call__(
        self, clip: Clip, prompt_token_ids: list[int], text_token_ids: list[int], /
    ) -> list[Span]:
        """Return the (begin, end) of each token of a text, in seconds of the clip.

        Tokens for which the context has no room get the clip's end. Raises EngineError."""
        end = self._hearing.tokens.end
        room = self._engine.info.max_model_len - len(prompt_token_ids) - 1
        text = text_token_ids[:room]
        feature = feature_of(clip)
        request = EngineRequest(
            id=f"{self._name}-{uuid.uuid4().hex[:8]}",
            spec=SequenceSpec(
                prompt_token_ids=[*prompt_token_ids, *text, end],
                params=_PARAMS,
                max_tokens=1,
                eos_token_ids=[],
                pooling=PoolingParams(),
                features=(feature,),
            ),
        )
        stream = self._engine.start_request(request, None, {feature.digest: source_of(clip)})
        try:
            delta = await anext(stream)
        finally:
            stream.close()
        if not delta.embedding:
            raise EngineError("The request ended before the times of its words were computed.")
        shape = len(self._hearing.alignment_heads), len(prompt_token_ids) + len(text) + 1
        weights = np.frombuffer(delta.embedding, np.float32)
        weights = weights[: shape[0] * shape[1] * feature.grid[0]].reshape(*shape, feature.grid[0])
        first = len(prompt_token_ids) - 1
        spans = await asyncio.to_thread(token_spans, weights, first, len(text))
        return spans + [(clip.seconds, clip.seconds)] * (len(text_token_ids) - len(text))
