"""What can be set of the programs that talk to a server: `tk top` and `tk chat`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from toolkit.config.fields import check_all, option
from toolkit.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopConfig:
    """The dashboard."""

    url: tuple[str, ...] = option(
        (DEFAULT_URL,),
        "The servers to watch.",
        aliases=("--base-url",),
        argument=True,
        metavar="URL",
        subject="Servers",
        common=True,
    )
    api_key: str | None = option(None, "Key of the servers.", metavar="KEY", common=True)
    admin_key: str | None = option(
        None,
        "Key of the servers' operator, where they have one. Live requests and settings want it.",
        metavar="KEY",
        common=True,
    )
    demo: bool = option(False, "Watch made-up servers; nothing is sent anywhere.", common=True)
    interval: float = option(
        1.0,
        "Seconds between two looks at a server.",
        minimum=0.1,
        maximum=3600.0,
        subject="Display",
        common=True,
    )
    window: float = option(
        30.0,
        "Seconds that percentiles, means and hit rates are taken over.",
        minimum=1.0,
        maximum=3600.0,
        common=True,
    )
    theme: Literal["auto", "dark", "light"] = option(
        "auto", "Colors; auto asks the terminal for its background.", common=True
    )
    once: bool = option(
        False,
        "Print one plain snapshot and exit; so it is too when the output is not a terminal.",
        subject="Output",
        common=True,
    )
    json: bool = option(False, "Print one snapshot as JSON and exit.", common=True)
    record: str | None = option(
        None, "Write every reading to this file. A line of JSON each.", metavar="FILE", common=True
    )
    replay: str | None = option(
        None, "Show a recording. One reading every --interval seconds.", metavar="FILE", common=True
    )

    def __post_init__(self) -> None:
        check_all(self)
        urls = dict.fromkeys(server_url(one) for one in self.url)
        if not urls:
            raise ConfigError(
                "--url is the address of a server, or several; it got none.", param="url"
            )
        object.__setattr__(self, "url", tuple(urls))
        if self.replay is not None and (self.demo or self.record is not None):
            other = "--demo" if self.demo else "--record"
            raise ConfigError(
                f"--replay shows a recording, and does not go with {other}.", param="replay"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """The terminal chat."""

    model: str | None = option(
        None,
        "The model to ask; where no server has it, a private one is started with it.",
        argument=True,
        metavar="MODEL",
        subject="Server",
        common=True,
    )
    prompt: str | None = option(
        None,
        "A question to answer once; what is piped in follows it. With spaces in it, it needs no MODEL before it.",
        argument=True,
        metavar="PROMPT",
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
    resume: bool = option(
        False, "Go on with the last conversation.", aliases=("--continue", "-c"), common=True
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
    top_p: float | None = option(
        None,
        "Samples from the likeliest tokens of this share. Default: the server's.",
        minimum=0.0,
        maximum=1.0,
    )
    seed: int | None = option(None, "The same seed gives the same answer.", minimum=0)
    tools: str | None = option(
        None, "Tools that the model may call: a JSON list, as the API takes it.", metavar="FILE"
    )
    schema: str | None = option(
        None, "JSON schema that answers have to fit.", metavar="FILE", subject="Output", common=True
    )
    json: bool = option(
        False,
        "Print the answer to PROMPT as JSON, with its tokens, times and reasoning.",
        common=True,
    )
    stream: bool = option(True, "Show an answer while it comes.")
    reasoning: Literal["short", "full", "hidden"] = option(
        "short",
        "How a model's reasoning is shown: folded once it has ended, in full, or not at all.",
    )

    def __post_init__(self) -> None:
        check_all(self)
        if self.prompt is None and self.model is not None and len(self.model.split()) > 1:
            object.__setattr__(self, "prompt", self.model)  # no model's name has spaces
            object.__setattr__(self, "model", None)
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
        raise ConfigError(
            f"--url is an address such as {DEFAULT_URL}; it got {text!r}.", param="url"
        )
    return url
