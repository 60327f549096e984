"""Options of Ollama's requests: used, accepted without effect, or refused with a reason."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from toolkit.api.http.body_fields import BY_KIND, LIST, TEXT, Body, Text
from toolkit.api.openai.schemas import STOPS, Int, answer_params
from toolkit.errors import InvalidRequestError
from toolkit.sampling.params import SamplingParams
from toolkit.sampling.structured_outputs import StructuredOutputsParams

_AT_START = Field(None, description="Not read: flags of tk serve choose it")
_NOT_READ = Field(None, description="Not read: Ollama's current engine does not read it, either")
_NO_LIMIT = (-1, -2)  # values of num_predict: until the end token, or the end of the context
_RANDOM_SEED = -1
_ALL_TOKENS, _NO_TOKENS = -1, 0  # values of repeat_last_n

OPTION_NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "penalty_window": "options.repeat_last_n",
} | {
    name: f"options.{name}"
    for name in (
        "temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty",
        "frequency_penalty",
    )
}  # fmt: skip
"""Names here of the engine's parameters, for errors."""


class ModelOptions(Body):
    """Options of an answer. Those left out have the model's defaults, not Ollama's."""

    temperature: float | None = Field(None, description="0 to 2; 0: always the likeliest token")
    top_k: Int | None = Field(None, description="0: every token")
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = Field(None, description="-1: a random one")
    stop: Annotated[Annotated[Text, TEXT] | Annotated[list[Text], STOPS, LIST], BY_KIND] | None = (
        Field(None, description="Texts that end an answer; the answer does not include them")
    )
    num_predict: int | None = Field(
        None,
        description="Maximum tokens to generate, up to the end of the context; -1 and -2: up to it",
    )
    repeat_penalty: float | None = None
    repeat_last_n: int | None = Field(
        None, description="Last tokens that penalties count; 0: none; -1: all, as without it"
    )
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: int | None = Field(None, description="Only 0 is supported")
    mirostat_tau: float | None = Field(None, description="Not read: for mirostat")
    mirostat_eta: float | None = Field(None, description="Not read: for mirostat")
    tfs_z: float | None = Field(None, description="Only 1 is supported")
    typical_p: float | None = Field(None, description="Only 1 is supported")
    penalize_newline: Any = _NOT_READ
    num_keep: Any = Field(None, description="Not read: conversations are not shortened")
    num_ctx: Any = _AT_START
    num_batch: Any = _AT_START
    num_gpu: Any = _AT_START
    main_gpu: Any = _AT_START
    num_thread: Any = _AT_START
    numa: Any = _AT_START
    low_vram: Any = _AT_START
    f16_kv: Any = _AT_START
    use_mmap: Any = _AT_START
    use_mlock: Any = _AT_START
    logits_all: Any = _NOT_READ
    vocab_only: Any = _NOT_READ
    embedding_only: Any = _NOT_READ

    def to_params(
        self,
        defaults: Mapping[str, Any],
        constraint: StructuredOutputsParams | None,
        logprobs: int | None,
    ) -> SamplingParams:
        """`defaults`: the model's. `logprobs`: likeliest tokens to report, None for none.

        Raises InvalidRequestError for an unsupported value."""
        self._check_samplers()
        return answer_params(
            defaults,
            self._max_tokens(),
            {
                "temperature": self.temperature,
                "top_k": self.top_k,
                "top_p": self.top_p,
                "min_p": self.min_p,
                "seed": None if self.seed == _RANDOM_SEED else self.seed,
                "stop": self.stop,
                **self._penalties(),
            },
            structured_outputs=constraint,
            logprobs=logprobs,
            ends_with_context=True,
        )

    def _max_tokens(self) -> int | None:
        return None if self.num_predict in _NO_LIMIT else self.num_predict

    def _penalties(self) -> dict[str, float | None]:
        """Return the engine's parameters for penalties."""
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

    def _check_samplers(self) -> None:
        """Raises InvalidRequestError for a sampler that the engine does not have."""
        for name, off in (("mirostat", 0), ("tfs_z", 1.0), ("typical_p", 1.0)):
            value = getattr(self, name)
            if value is not None and value != off:
                raise InvalidRequestError(
                    f"{name} {value:g} is not supported: the engine does not have this sampler. "
                    f"Leave it out, or set it to {off:g}.",
                    param=f"options.{name}",
                )
