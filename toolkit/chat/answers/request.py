"""The body of a chat request, built from the settings."""

from pathlib import Path
from typing import Any

import orjson

from toolkit.chat.answers.answer_view import Message
from toolkit.config.clients import ChatConfig
from toolkit.errors import ConfigError

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("max_tokens", "seed"),
)


def request_body(config: ChatConfig, model: str, messages: list[Message]) -> dict[str, Any]:
    """Return the body of a chat request. Raises ConfigError if a file cannot be used."""
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": config.stream}
    if config.stream:
        body["stream_options"] = {"include_usage": True}
    body |= {name: getattr(config, name) for name in SAMPLING if getattr(config, name) is not None}
    if config.schema is not None:
        schema = _read_json(config.schema, "schema", dict)
        json_schema = {"name": "answer", "schema": schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    if config.tools is not None:
        body["tools"] = _read_json(config.tools, "tools", list)
    return body


def _read_json(name: str, setting: str, kind: type[dict[str, Any]] | type[list[Any]]) -> Any:
    try:
        content = orjson.loads(Path(name).expanduser().read_bytes())
    except OSError as error:
        raise ConfigError(
            f"--{setting}: cannot read {name}: {error.strerror}.", param=setting
        ) from None
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"--{setting}: {name} is not JSON: {error}.", param=setting) from None
    if not isinstance(content, kind):
        expected = "object" if kind is dict else "list"
        raise ConfigError(f"--{setting}: {name} is not a JSON {expected}.", param=setting)
    return content
