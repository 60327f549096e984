"""Settings of speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from toolkit.config.fields import check_all, option
from toolkit.errors import ConfigError, did_you_mean

MOST_DRAFTS = 16
METHODS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")
WITHOUT_MODEL = ("ngram", "mtp")
"""Methods whose drafter is no model of its own."""


class Speculation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """--speculative-config. The fields are vLLM's."""

    method: Literal["ngram", "draft_model", "eagle", "eagle3", "mtp"]
    num_speculative_tokens: int
    model: str | None = None  # folder or hub name of the drafter
    revision: str | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Speculation:
        """Check the JSON of --speculative-config. Raises ConfigError."""
        given = _with_method(given)
        problem = _problem_of(given)
        if problem is None:
            default = {"ngram": 4, "mtp": 1}.get(given["method"], 3)
            try:
                found = msgspec.convert({"num_speculative_tokens": default, **given}, cls)
            except msgspec.ValidationError as error:
                problem = str(error)
            else:
                problem = found._problem()
        if problem is not None:
            end = "" if problem.endswith((".", "?")) else "."
            raise ConfigError(f"--speculative-config: {problem}{end}", param="speculative_config")
        return found

    def _problem(self) -> str | None:
        if not 1 <= self.num_speculative_tokens <= MOST_DRAFTS:
            return (
                f"num_speculative_tokens must be 1 to {MOST_DRAFTS}; got "
                f"{self.num_speculative_tokens}"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            return "prompt_lookup_min must be at least 1, and prompt_lookup_max not less"
        if self.method in WITHOUT_MODEL and self.model is not None:
            return f"the method {self.method} has no model"
        if self.method not in WITHOUT_MODEL and not self.model:
            return f"the method {self.method} needs a model"
        return None


def _with_method(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON with the method that vLLM would choose by the model's name."""
    method, model = given.get("method"), given.get("model")
    if isinstance(method, str) and method.endswith("_mtp"):
        return {**given, "method": "mtp"}  # older names: deepseek_mtp
    if method is not None or not isinstance(model, str):
        return given
    if model in ("ngram", "[ngram]"):
        return {**given, "method": "ngram", "model": None}
    name = model.lower()
    found = "eagle3" if "eagle3" in name else "eagle" if "eagle-" in name else "draft_model"
    return {**given, "method": found}


def _problem_of(given: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the names in the JSON, or None."""
    method = given.get("method")
    if method is None:
        return f"method is missing; it is one of {', '.join(METHODS)}"
    if method not in METHODS:
        names = ", ".join(METHODS)
        return f"unknown method {method!r}; known: {names}.{did_you_mean(str(method), METHODS)}"
    for name in given:
        if name not in Speculation.__struct_fields__:
            fields = Speculation.__struct_fields__
            hint = did_you_mean(name, fields)
            return f"unknown field {name!r}; known: {', '.join(fields)}.{hint}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Speculative decoding."""

    speculative_config: Mapping[str, Any] | None = option(
        None,
        'Guess tokens and verify several in one step, as a JSON object: {"method": "ngram"} looks '
        "for the last tokens earlier in the text. The answers do not change. Other fields: model, "
        "revision, num_speculative_tokens, prompt_lookup_min, prompt_lookup_max.",
        metavar="JSON",
        subject="Speculation",
    )

    def __post_init__(self) -> None:
        check_all(self)
        if self.speculative_config is not None:
            Speculation.parse(self.speculative_config)

    @property
    def drafter(self) -> Speculation | None:
        """The settings, or None if steps verify no drafts."""
        given = self.speculative_config
        return None if given is None else Speculation.parse(given)

    @property
    def most_drafts(self) -> int:
        """Drafts of a request that a step verifies, at most."""
        return 0 if self.drafter is None else self.drafter.num_speculative_tokens
