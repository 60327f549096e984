"""Sampling options with llama.cpp's names, which Ollama has taken over."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from toolkit.api.http.body_fields import BY_KIND, LIST, TEXT, Body, Text
from toolkit.api.openai.schemas import STOPS, Int
from toolkit.errors import InvalidRequestError

_RANDOM_SEEDS = (-1, 2**32 - 1)  # the second is the first as 32 bits without a sign
_ALL_TOKENS, _NO_TOKENS = -1, 0  # values of repeat_last_n
NO_LIMIT = (-1, -2)  # values of n_predict: until the end token, or the end of the context

PARAM_NAMES = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "penalty_window": "repeat_last_n",
}
"""Names here of the engine's parameters, for errors."""


class LlamaSampling(Body):
    """Options left out have the model's defaults, not llama.cpp's."""

    temperature: float | None = Field(None, description="0 to 2; 0: always the likeliest token")
    top_k: Int | None = Field(None, description="0: every token")
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = Field(None, description="Only 1 is supported")
    seed: int | None = Field(None, description="-1: a random one")
    stop: Annotated[Annotated[Text, TEXT] | Annotated[list[Text], STOPS, LIST], BY_KIND] | None = (
        Field(None, description="Texts that end an answer; the answer does not include them")
    )
    repeat_penalty: float | None = None
    repeat_last_n: int | None = Field(
        None, description="Last tokens that penalties count; 0: none; -1: all, as without it"
    )
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def sampling(self) -> Mapping[str, Any]:
        """Return the engine's parameters. Raises InvalidRequestError for a missing sampler."""
        self.require_off("typical_p", 1.0)
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": None if self.seed in _RANDOM_SEEDS else self.seed,
            "stop": self.stop,
            **self._penalties(),
        }

    def require_off(self, name: str, off: float) -> None:
        """Raise InvalidRequestError for a sampler that the engine does not have."""
        value = getattr(self, name)
        if value is not None and value != off:
            raise InvalidRequestError(
                f"{name} {value:g} is not supported: the engine does not have this sampler. "
                f"Leave it out, or set it to {off:g}.",
                param=name,
            )

    def _penalties(self) -> Mapping[str, float | None]:
        if self.repeat_last_n == _NO_TOKENS:
            return {
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
            }
        return {
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "penalty_window": None if self.repeat_last_n == _ALL_TOKENS else self.repeat_last_n,
        }
