"""What a request may ask of the sampler. Names, defaults and meanings are vLLM's."""

from __future__ import annotations

from typing import Any

import msgspec

from toolkit.errors import InvalidRequestError

MAX_LOGPROBS = 100
MAX_STOP_STRINGS = 64
_GREATEST = 2**31 - 1
_WHOLE = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen, and when it ends.

    Raises InvalidRequestError for a value out of its range. Lengths are in tokens.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    """0 or -1: every token."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    """None: as many as the context holds."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    """How many of the likeliest tokens to report at each output position, besides the chosen one."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        self.stop = _as_list(self.stop)
        self.stop_token_ids = list(self.stop_token_ids or [])
        for name in _WHOLE:
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise InvalidRequestError(f"{name} is a whole number; it got {value!r}.", param=name)
        if self.top_k == -1:
            self.top_k = 0
        _within("n", self.n, 1, 128)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_k", self.top_k, 0, _GREATEST)
        _within("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise _out_of_range("top_p", self.top_p, "above 0 and at most 1")
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.001, 1000.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _within("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 1, _GREATEST)
        _within("min_tokens", self.min_tokens, 0, _GREATEST if self.max_tokens is None else self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _within(name, getattr(self, name), 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS or not all(
            isinstance(s, str) and 1 <= len(s) <= 1024 for s in self.stop
        ):
            raise InvalidRequestError(
                f"stop takes at most {MAX_STOP_STRINGS} strings of 1 to 1024 characters.", param="stop"
            )
        if self.stop and not self.detokenize:
            raise InvalidRequestError(
                "stop needs the answer's text, so that detokenize stays on.", param="stop"
            )
        for name in ("stop_token_ids", "logit_bias"):
            if not all(type(token) is int for token in getattr(self, name) or ()):
                raise InvalidRequestError(f"{name} names tokens by their numbers.", param=name)
        for bias in (self.logit_bias or {}).values():
            _within("logit_bias", bias, -100.0, 100.0)

    @property
    def stop_strings(self) -> list[str]:
        assert isinstance(self.stop, list)
        return self.stop

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _as_list(stop: list[str] | str | None) -> list[str]:
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else list(stop)


def _within(name: str, value: Any, low: float, high: float | None) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidRequestError(f"{name} is a number; it got {value!r}.", param=name)
    if value < low or (high is not None and value > high) or value != value:
        wanted = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
        raise _out_of_range(name, value, wanted)


def _out_of_range(name: str, value: Any, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {wanted}; it got {value!r}.", param=name)
