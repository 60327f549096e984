"""Options of Ollama's requests: used, accepted without effect, or refused with a reason."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from toolkit.api.llama_cpp.sampling import NO_LIMIT, LlamaSampling
from toolkit.api.openai.schemas import answer_params
from toolkit.sampling.params import SamplingParams
from toolkit.sampling.structured_outputs import StructuredOutputsParams

_AT_START = Field(None, description="Not read: flags of tk serve choose it")
_NOT_READ = Field(None, description="Not read: Ollama's current engine does not read it, either")

OPTION_NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "penalty_window": "options.repeat_last_n",
} | {
    name: f"options.{name}"
    for name in (
        "temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty",
        "frequency_penalty", "mirostat", "tfs_z", "typical_p",
    )
}  # fmt: skip
"""Names here of the engine's parameters and llama.cpp's samplers, for errors."""


class ModelOptions(LlamaSampling):
    """Options of an answer. Those left out have the model's defaults, not Ollama's."""

    num_predict: int | None = Field(
        None,
        description="Maximum tokens to generate, up to the end of the context; -1 and -2: up to it",
    )
    mirostat: int | None = Field(None, description="Only 0 is supported")
    mirostat_tau: float | None = Field(None, description="Not read: for mirostat")
    mirostat_eta: float | None = Field(None, description="Not read: for mirostat")
    tfs_z: float | None = Field(None, description="Only 1 is supported")
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
        self.require_off("mirostat", 0)
        self.require_off("tfs_z", 1.0)
        return answer_params(
            defaults,
            None if self.num_predict in NO_LIMIT else self.num_predict,
            self.sampling(),
            structured_outputs=constraint,
            logprobs=logprobs,
            ends_with_context=True,
        )
