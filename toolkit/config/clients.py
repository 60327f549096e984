"""What can be set of the programs that talk to a server: `tk bench`, `tk top` and `tk chat`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from toolkit.config.fields import check_all, option
from toolkit.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The load generator."""

    url: str = option(
        DEFAULT_URL, "The server to load.", aliases=("--base-url",), subject="Server", common=True
    )
    model: str | None = option(
        None, "Model to ask for. Default: the first that the server lists.", common=True, metavar="NAME"
    )
    endpoint: Literal["completions", "chat"] = option(
        "completions", "Which route of the API to load.", common=True
    )
    request_rate: float = option(
        math.inf,
        "Requests per second, arriving at random (Poisson); inf sends all at once.",
        aliases=("--rps",),
        minimum=0.0,
        subject="Load",
        common=True,
    )
    num_prompts: int | None = option(
        None,
        "Requests to send. Default: 200, or with --duration as many as it takes.",
        minimum=1,
        common=True,
    )
    duration: float | None = option(None, "Seconds after which no request is sent any more.", minimum=0.0)
    max_concurrency: int | None = option(
        None,
        "Most requests in flight. With --rps inf, each answer starts the next request.",
        minimum=1,
        common=True,
    )
    clients: int | None = option(
        None,
        "Processes to send from. Default: as many as the load needs, at most a quarter of the cores.",
        minimum=1,
    )
    random_input_len: int = option(
        128,
        "Length of a prompt, in tokens; in a chat, in words.",
        minimum=1,
        subject="Prompts and answers",
        common=True,
    )
    random_output_len: int = option(128, "Tokens asked for in an answer.", minimum=1, common=True)
    random_range_ratio: float = option(
        0.0, "Lengths are uniform between length x (1 - r) and length x (1 + r).", minimum=0.0, maximum=1.0
    )
    random_vocab_size: int = option(1000, "Prompts are drawn from token ids below this.", minimum=1)
    ignore_eos: bool = option(True, "Ask for answers of full length, past the end-of-sequence token.")
    num_warmups: int = option(
        0, "Requests sent and finished before the measurement.", minimum=0, subject="Measurement"
    )
    seed: int = option(0, "Seeds the arrivals, lengths and prompts.", minimum=0)
    api_key: str | None = option(None, "Key of the server.")
    json: bool = option(False, "Print the result as JSON instead of a table.")
    save_result: str | None = option(None, "Write the result as JSON to this file too.", metavar="FILE")

    def __post_init__(self) -> None:
        check_all(self)
        object.__setattr__(self, "url", server_url(self.url))
        if not self.request_rate > 0:  # NaN too
            raise ConfigError(
                f"--request-rate is above 0; it got {self.request_rate!r}.", param="request_rate"
            )
        if self.duration is not None and not self.paced and self.max_concurrency is None:
            raise ConfigError(
                "--duration needs --rps or --max-concurrency: without them every request is sent at once.",
                param="duration",
            )

    @property
    def paced(self) -> bool:
        """Whether requests arrive by a clock."""
        return math.isfinite(self.request_rate)

    @property
    def count(self) -> int | None:
        """Most requests to send; None when only `duration` ends the run."""
        if self.num_prompts is None and self.duration is None:
            return 200
        return self.num_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class TopConfig:
    """The dashboard."""

    url: str = option(DEFAULT_URL, "The server to watch.", aliases=("--base-url",), subject="Server")
    interval: float = option(
        1.0, "Seconds between two looks at the server.", minimum=0.1, maximum=3600.0, subject="Display"
    )
    window: float = option(
        30.0,
        "Seconds of history that latencies and the prefix hit rate are taken from.",
        minimum=1.0,
        maximum=3600.0,
    )
    api_key: str | None = option(None, "Key of the server.")
    once: bool = option(
        False, "Print one plain snapshot and exit; so it is too when the output is not a terminal."
    )

    def __post_init__(self) -> None:
        check_all(self)
        object.__setattr__(self, "url", server_url(self.url))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """The terminal chat."""

    model: str | None = option(
        None,
        "With --url: the name to ask for. Without: the model to start a private server with.",
        argument=True,
        metavar="MODEL",
        subject="Server",
        common=True,
    )
    url: str | None = option(
        None,
        f"The server to talk to. Default: {DEFAULT_URL} if one runs there, else a private one.",
        aliases=("--base-url",),
        common=True,
    )
    api_key: str | None = option(None, "Key of the server.")
    system: str | None = option(
        None,
        "System message that the conversation begins with.",
        metavar="TEXT",
        subject="Conversation",
        common=True,
    )
    temperature: float | None = option(
        None,
        "0 is deterministic, higher is more varied. Default: the server's.",
        minimum=0.0,
        maximum=2.0,
        common=True,
    )
    max_tokens: int | None = option(
        None, "Most tokens in an answer. Default: the server's.", minimum=1, common=True
    )

    def __post_init__(self) -> None:
        check_all(self)
        if self.url is not None:
            object.__setattr__(self, "url", server_url(self.url))


def server_url(text: str) -> str:
    """The root of a server: `host:port`, a trailing slash and a trailing `/v1` are accepted.

    Raises ConfigError when it is not an http(s) address.
    """
    url = text.strip() if "://" in text else f"http://{text.strip()}"
    url = url.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # raises when it is not a port
    except ValueError as error:
        raise ConfigError(f"--url is not an address: {text!r} ({error}).", param="url") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"--url is an address such as {DEFAULT_URL}; it got {text!r}.", param="url")
    return url
