"""Ollama's replies, as msgspec structs. Durations are nanoseconds."""

from datetime import UTC, datetime
from typing import Any

import msgspec

from toolkit.api.openai.replies import TokenLogprob


def now() -> datetime:
    return datetime.now(UTC)


class Measures(msgspec.Struct, omit_defaults=True, kw_only=True):
    """End of an answer: its reason, times and counts. Only the last line of a stream has it."""

    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None  # until the engine takes the request
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class ReplyFunction(msgspec.Struct):
    name: str
    arguments: Any
    index: int


class ReplyCall(msgspec.Struct):
    id: str
    function: ReplyFunction


class ReplyMessage(msgspec.Struct):
    content: str = ""
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ReplyCall] | msgspec.UnsetType = msgspec.UNSET
    role: str = "assistant"


class OllamaChatReply(Measures):
    """Answer of a chat, or a line of its stream."""

    model: str
    created_at: datetime
    message: ReplyMessage
    done: bool
    logprobs: list[TokenLogprob] | msgspec.UnsetType = msgspec.UNSET


class OllamaGenerateReply(Measures):
    """Answer to a prompt, or a line of its stream."""

    model: str
    created_at: datetime
    response: str
    done: bool
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[TokenLogprob] | msgspec.UnsetType = msgspec.UNSET


class ModelDetails(msgspec.Struct):
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    parent_model: str = ""


class OllamaModel(msgspec.Struct, kw_only=True):
    name: str
    model: str
    digest: str
    size: int
    details: ModelDetails


class ListedModel(OllamaModel, kw_only=True):
    modified_at: datetime


class ListedModels(msgspec.Struct):
    models: list[ListedModel]


class RunningModel(OllamaModel, kw_only=True):
    expires_at: datetime
    size_vram: int
    context_length: int


class RunningModels(msgspec.Struct):
    models: list[RunningModel]


class ShownModel(msgspec.Struct, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: datetime


class OllamaVersion(msgspec.Struct):
    version: str


class PullStatus(msgspec.Struct):
    """Reply of /api/pull."""

    status: str = "success"


class OllamaEmbeddings(msgspec.Struct):
    """Reply of /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct):
    """Reply of /api/embeddings."""

    embedding: list[float]
