"""From a prompt as users give it to a request the engine can run: tokenized, checked, resolved."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from toolkit.engine.messages import EngineRequest
from toolkit.errors import CheckpointError, InvalidParamError, InvalidRequestError
from toolkit.sampling.params import SamplingParams
from toolkit.sequence import SequenceSpec
from toolkit.text.tokenizer import Tokenizer, eos_token_ids
from toolkit.worker import WorkerInfo

Prompt = str | list[int] | Mapping[str, object]
"""Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}."""


class InputProcessor:
    """Checks are made here, once, so that the engine core takes every request it gets."""

    def __init__(self, folder: Path, tokenizer: Tokenizer | None, info: WorkerInfo) -> None:
        self.tokenizer = tokenizer
        self.info = info
        self.default_sampling = default_sampling(folder)
        self._eos = [id for id in eos_token_ids(folder, tokenizer) if id < info.vocab_size]

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        is_streamed: bool = True,
    ) -> tuple[str | None, EngineRequest]:
        """Return (the prompt's text if it was text, the request).

        If it is not streamed, the core may report its tokens together at the end. Raises
        InvalidRequestError: an empty or over-long prompt, a token outside the vocabulary.
        """
        self.require_generation()
        text, token_ids = self._tokens(prompt)
        if not token_ids:
            raise InvalidRequestError("The prompt is empty.", param="prompt")
        kept = self._num_kept(params)
        if len(token_ids) > kept:
            text, token_ids = None, token_ids[-kept:]
        wrong = next(
            (t for t in (min(token_ids), max(token_ids)) if not 0 <= t < self.info.vocab_size), None
        )
        if wrong is not None:
            raise InvalidRequestError(
                f"The prompt has the token {wrong}, and the model's tokens are 0 to {self.info.vocab_size - 1}.",
                param="prompt",
            )
        if params.stop:
            self.require_tokenizer()
        params = self.with_bad_words(params)
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            self._check_tokens(name, getattr(params, name) or ())
        for sequence in params.bad_words_token_ids or ():
            self._check_tokens("bad_words_token_ids", sequence)
        self._check_some_allowed(params)
        spec = SequenceSpec(
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=self._max_tokens(len(token_ids), params),
            eos_token_ids=self._eos,
            priority=priority,
            grammar=self._grammar(params),
            # Stop strings are found here, and log-probabilities come with each token.
            is_final_only=not (is_streamed or params.stop_strings or params.logprobs is not None),
        )
        return text, EngineRequest(id=request_id or uuid.uuid4().hex, spec=spec)

    def _grammar(self, params: SamplingParams) -> str:
        """What the answer is bound to; empty for anything. Raises InvalidRequestError when that cannot be held."""
        if params.structured_outputs is None:
            return ""
        self.require_tokenizer()
        if not self._eos:
            raise InvalidRequestError(
                "structured_outputs needs a token that ends answers, and this model has none.",
                param="structured_outputs",
            )
        return params.structured_outputs.to_grammar()

    def check_length(self, text: str) -> None:
        """Raises InvalidRequestError for a text that is absurdly long, before anybody tokenizes it: a character is at
        most a handful of tokens less than one.
        """
        if len(text) > 64 * self.info.max_model_len + 4096:
            raise self._too_long(f"{len(text)} characters")

    @property
    def eos_token_ids(self) -> list[int]:
        """What ends an answer."""
        return self._eos

    def with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """With bad words in tokens, so that it is not done again for each prompt that shares them."""
        if not params.bad_words:
            return params
        return msgspec.structs.replace(
            params, bad_words=None, bad_words_token_ids=self._bad_words(params)
        )

    def _check_tokens(self, name: str, token_ids: Collection[int]) -> None:
        for token in (min(token_ids), max(token_ids)) if token_ids else ():
            if not 0 <= token < self.info.vocab_size:
                raise InvalidRequestError(
                    f"{name} has the token {token}, and the model's tokens are 0 to {self.info.vocab_size - 1}.",
                    param=name,
                )

    def _num_kept(self, params: SamplingParams) -> int:
        """How many of a prompt's tokens are kept: all that there can be, unless truncation is asked for."""
        limit, asked = self.info.max_model_len, params.truncate_prompt_tokens
        if asked is None:
            return sys.maxsize
        if asked > limit:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {asked}, and the model's context is {limit} tokens.",
                param="truncate_prompt_tokens",
            )
        return max(1, limit - (params.max_tokens or 1)) if asked == -1 else asked

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Bad words in tokens, as they are at the beginning of a text and as they are after a space."""
        tokenizer = self.require_tokenizer()
        sequences = list(params.bad_words_token_ids or [])
        for word in params.bad_words or ():
            plain = tokenizer.encode(word, add_special_tokens=False)
            spaced = tokenizer.encode(" " + word.lstrip(" "), add_special_tokens=False)
            if spaced[-len(plain) :] == plain:  # the space is a token of its own
                spaced = []
            sequences += [one for one in (plain, spaced) if one]
        return sequences

    def _check_some_allowed(self, params: SamplingParams) -> None:
        """Raises InvalidRequestError when nothing would be left to choose from, at the first token at least."""
        taken_out = {one[0] for one in params.bad_words_token_ids or () if len(one) == 1}
        if params.min_tokens:
            taken_out |= {*self._eos, *(params.stop_token_ids or ())}
        allowed = params.allowed_token_ids or range(self.info.vocab_size)
        if len(taken_out) >= len(allowed) and taken_out.issuperset(allowed):
            some = params.allowed_token_ids is not None
            raise InvalidRequestError(
                f"All of {'allowed_token_ids' if some else 'the tokens'} are forbidden by bad_words or min_tokens.",
                param="allowed_token_ids"
                if some
                else "min_tokens"
                if params.min_tokens
                else "bad_words",
            )

    def require_generation(self) -> None:
        """Raises InvalidRequestError when the model does not continue prompts."""
        if not self.info.generates and self.info.pooling is not None:
            paths = "/v1/score and /v1/rerank"
            if self.info.pooling.task == "embed":
                paths = f"/v1/embeddings (LLM.embed), {paths}"
            raise InvalidRequestError(
                f"This model generates no text: it answers {paths}.",
                param="model",
                code="model_not_supported",
            )

    def require_tokenizer(self) -> Tokenizer:
        """Raises InvalidRequestError when the model came without a tokenizer."""
        if self.tokenizer is None:
            raise InvalidRequestError(
                "This model's folder has no tokenizer, so that it takes prompts of token ids only, and no stop strings; "
                "--tokenizer names another folder."
            )
        return self.tokenizer

    def chat_prompt(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """The tokens of a conversation by the model's chat template (`Tokenizer.encode_chat` has the options)."""
        self.require_generation()
        return self.require_tokenizer().encode_chat(messages, check=self.check_length, **options)

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            self.check_length(prompt)
            return prompt, self.require_tokenizer().encode(prompt)
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                ids = prompt["prompt_token_ids"]
                text = prompt.get("prompt")
                return (text if isinstance(text, str) else None), self._tokens(_as_ids(ids))[1]
            inner = prompt.get("prompt")
            if isinstance(inner, str):
                return self._tokens(inner)
            raise InvalidRequestError(
                'A prompt is text, a list of token ids, or {"prompt": text} or {"prompt_token_ids": ids}.',
                param="prompt",
            )
        return None, _as_ids(prompt)

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        limit = self.info.max_model_len
        if num_prompt_tokens >= limit:
            raise self._too_long(f"{num_prompt_tokens} tokens")
        room = limit - num_prompt_tokens
        if params.max_tokens is None:
            return room
        if params.max_tokens > room:
            raise InvalidParamError(
                "max_tokens",
                f"asks for {params.max_tokens} tokens, and the prompt of {num_prompt_tokens} leaves "
                f"room for {room}: the model's context is {limit} tokens. Ask for at most {room}, "
                "or shorten the prompt.",
                code="context_length_exceeded",
            )
        return params.max_tokens

    def _too_long(self, size: str) -> InvalidRequestError:
        limit = self.info.max_model_len
        return InvalidRequestError(
            f"The prompt has {size}, and the model's context is {limit} tokens, of which an answer needs at least one.",
            param="prompt",
            code="context_length_exceeded",
        )


def default_sampling(folder: Path) -> dict[str, Any]:
    """What the model's generation_config.json wants where a request says nothing, as SamplingParams' fields.

    `do_sample: false` is the likeliest token always. Raises CheckpointError for a value out of range.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
        found = {name: content[name] for name in _FROM_MODEL if content.get(name) is not None}
        if content.get("do_sample") is False:
            found["temperature"] = 0.0
        SamplingParams(**found)
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from None
    return found


_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _as_ids(ids: object) -> list[int]:
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise InvalidRequestError(
            "A prompt of token ids is a list of whole numbers.", param="prompt"
        )
    return ids
