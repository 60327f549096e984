"""Sampling parameters of a request. Names, defaults and meanings are vLLM's."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from toolkit.config.engine import MAX_LOGPROBS, REQUEST_DEFAULTS
from toolkit.errors import InvalidParamError, InvalidRequestError
from toolkit.sampling.structured_outputs import THINK_END as THINK_END
from toolkit.sampling.structured_outputs import THINK_START as THINK_START
from toolkit.sampling.structured_outputs import StructuredOutputsParams

MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 256
MAX_TEXT = 16_384  # characters of all `stop` strings, and of all `bad_words`
MAX_BEAM_WIDTH = 64
MAX_EXTRA_ARGS = 65_536  # bytes of all `extra_args`, as MessagePack
_MAX_INT = 2**31 - 1
_INTEGERS = (
    "n",
    "top_k",
    "penalty_window",
    "seed",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "num_speculative_tokens",
)


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Rules by which one request's tokens are chosen and it ends. Lengths are in tokens.

    Raises InvalidRequestError for a value out of range."""

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: every token
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int | None = None
    """Last tokens of prompt and answer that the penalties count. None: all."""
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None  # the only tokens that can be chosen. None: all
    bad_words: list[str] | None = None
    """Texts that the answer must not contain: the token that would complete one is not chosen."""
    bad_words_token_ids: list[list[int]] | None = None
    """Token sequences that it must not contain. The engine adds those of `bad_words`."""
    seed: int | None = None
    max_tokens: int | None = 16
    """None: up to the end of the context. 0: only compute the prompt."""
    ends_with_context: bool = False
    """Allow a `max_tokens` beyond the context, whose end then ends the answer."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    """Likeliest tokens to report at each output position, besides the chosen one."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = False
    """Put a space on either side of special tokens that are not skipped."""
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    extra_args: dict[str, Any] | None = None
    """Arguments of logits processors, by name. They also say which processors run."""
    truncate_prompt_tokens: int | None = None
    """Keep the last so many tokens of the prompt. -1: as many as leave room for the answer."""
    num_speculative_tokens: int | None = None
    """Most guesses that a step verifies. 0: none. None: as many as the engine does."""
    prediction: str | None = None
    """Text that the answer may resemble. With the drafter ngram, it is guessed from it."""

    def __post_init__(self) -> None:
        self.stop = _as_list(self.stop)
        self.stop_token_ids = list(self.stop_token_ids or [])
        self.bad_words = _as_list(self.bad_words)
        for name in _INTEGERS:
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise InvalidParamError(name, f"must be a whole number; got {value!r}.")
        if self.top_k == -1:
            self.top_k = 0
        _within("n", self.n, 1, 128)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_k", self.top_k, 0, _MAX_INT)
        _within("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise _out_of_range("top_p", self.top_p, "above 0 and at most 1")
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, None)
        if not 0.0 < self.repetition_penalty < math.inf:
            raise _out_of_range("repetition_penalty", self.repetition_penalty, "above 0 and finite")
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.penalty_window is not None:
            _within("penalty_window", self.penalty_window, 1, _MAX_INT)
        if self.seed is not None:
            _within("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 0, None)
            self.max_tokens = min(self.max_tokens, 2**63)  # the context bounds it, in any case
        _within(
            "min_tokens",
            self.min_tokens,
            0,
            _MAX_INT if self.max_tokens is None else self.max_tokens,
        )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _within(name, getattr(self, name), 0, MAX_LOGPROBS)
        _check_texts("stop", self.stop, MAX_STOP_STRINGS)
        if self.stop and not self.detokenize:
            raise InvalidParamError("stop", "needs the answer's text: leave detokenize on.")
        _check_texts("bad_words", self.bad_words, MAX_BAD_WORDS)
        for sequence in self.bad_words_token_ids or ():
            if not sequence or not all(type(token) is int for token in sequence):
                raise InvalidRequestError(
                    "bad_words_token_ids must be lists of at least one token id.",
                    param="bad_words_token_ids",
                )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError(
                "allowed_token_ids is empty: no token could be chosen.",
                param="allowed_token_ids",
            )
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            _within("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, _MAX_INT)
        if self.num_speculative_tokens is not None:
            _within("num_speculative_tokens", self.num_speculative_tokens, 0, _MAX_INT)
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            _check_token_ids(name, getattr(self, name))
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids))
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = list(dict.fromkeys(self.allowed_token_ids))
        for bias in (self.logit_bias or {}).values():
            _within("logit_bias", bias, -100.0, 100.0)
        if self.extra_args is not None and len(_encoded(self.extra_args)) > MAX_EXTRA_ARGS:
            raise InvalidParamError("extra_args", f"takes at most {MAX_EXTRA_ARGS} bytes.")

    @property
    def size(self) -> int:
        """Characters and token ids in its lists: a measure of the cost of a copy."""
        lists = (
            self.stop_token_ids,
            self.allowed_token_ids,
            self.logit_bias,
            *(self.bad_words_token_ids or ()),
        )
        size = sum(len(one) for one in lists if one) + sum(map(len, self.stop_strings))
        return size + (len(_encoded(self.extra_args)) if self.extra_args else 0)

    @property
    def has_biases(self) -> bool:
        """True if it changes or removes single logits."""
        return bool(
            self.logit_bias or self.min_tokens or self.allowed_token_ids or self.bad_words_token_ids
        )

    @property
    def stop_strings(self) -> list[str]:
        assert isinstance(self.stop, list)
        return self.stop

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class BeamSearchParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters of beam search. Names and meanings are those of Transformers.

    A beam's score is the sum of its tokens' log-probabilities, divided by its length to the power
    of `length_penalty`. Raises InvalidRequestError for a value out of range."""

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    """When to end. True: with `beam_width` finished beams. False: when better ones are unlikely.
    "never": when better ones are impossible."""
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    """Likeliest tokens to report at each output position, besides the chosen one."""

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            if type(getattr(self, name)) is not int:
                raise InvalidRequestError(
                    f"{name} must be a whole number; got {getattr(self, name)!r}.", param=name
                )
        _within("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        _within("max_tokens", self.max_tokens, 1, None)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _within("length_penalty", self.length_penalty, -10.0, 10.0)
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequestError(
                f"early_stopping must be true, false or 'never'; got {self.early_stopping!r}.",
                param="early_stopping",
            )
        _check_token_ids("stop_token_ids", self.stop_token_ids)


def answer_seed(seed: int, index: int) -> int:
    """Return the seed of a request's answer, 64 bits with a sign.

    The first answer has the request's own. The others' are hashes, so that answers of requests with
    neighbouring seeds differ."""
    if index == 0:
        return (seed + 2**63) % 2**64 - 2**63
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _as_list(stop: list[str] | str | None) -> list[str]:
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else list(stop)


def _encoded(extra_args: dict[str, Any]) -> bytes:
    try:
        return msgspec.msgpack.encode(extra_args)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidParamError("extra_args", f"cannot be sent to the engine: {error}.") from None


def _check_token_ids(name: str, token_ids: Iterable[object] | None) -> None:
    if not all(type(token) is int for token in token_ids or ()):
        raise InvalidRequestError(f"{name} must contain token ids.", param=name)


def _check_texts(name: str, texts: list[str], most: int) -> None:
    good = len(texts) <= most and all(
        isinstance(text, str) and 1 <= len(text) <= 1024 for text in texts
    )
    if not good or sum(map(len, texts)) > MAX_TEXT:
        raise InvalidParamError(
            name,
            f"takes at most {most} texts of 1 to 1024 characters, {MAX_TEXT} characters in all.",
        )


def _within(name: str, value: Any, low: float, high: float | None) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidParamError(name, f"must be a number; got {value!r}.")
    if value < low or (high is not None and value > high) or value != value:
        wanted = (
            f"at least {_bound(low)}"
            if high is None
            else f"between {_bound(low)} and {_bound(high)}"
        )
        raise _out_of_range(name, value, wanted)


def _bound(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _out_of_range(name: str, value: Any, wanted: str) -> InvalidRequestError:
    return InvalidParamError(name, f"must be {wanted}; got {value!r}.")


class PoolingParams(msgspec.Struct, array_like=True):
    """Parameters of a prompt that is pooled instead of continued."""

    second_text: int = 0
    """Position of the second text's first token, if two are compared. 0: one text."""


def default_sampling(generation_config: dict[str, Any]) -> dict[str, Any]:
    """Return a model's defaults, as fields of SamplingParams.

    `do_sample: false` means greedy decoding. Raises ValueError or TypeError for wrong values."""
    given = generation_config
    found = {name: given[name] for name in REQUEST_DEFAULTS if given.get(name) is not None}
    if given.get("do_sample") is False:
        found["temperature"] = 0.0
    SamplingParams(**found)
    return found


def describe_sampling(defaults: Mapping[str, Any]) -> str:
    """Describe a model's defaults in a phrase, such as `temperature 0.8, top-k 40`."""
    named = {"temperature": 1.0, **defaults}
    shown = [
        f"{name.replace('_', '-')} {named[name]:g}" for name in REQUEST_DEFAULTS if name in named
    ]
    return ", ".join(shown).replace("repetition-penalty", "repetition penalty")
