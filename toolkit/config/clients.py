"""Settings of the clients: `tk top`, `tk chat` and `tk transcribe`."""

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from toolkit.config.engine import without_latest
from toolkit.config.fields import Word, check_all, option
from toolkit.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"
CACERT = (
    "Certificates (PEM) of authorities, or of the server, to trust over TLS. Default: the "
    "system's, or those of SSL_CERT_FILE."
)
INSECURE = "Accept any certificate over TLS. Others may then read and change what is sent."


@dataclass(frozen=True, slots=True, kw_only=True)
class TopConfig:
    """Settings of the dashboard."""

    url: tuple[str, ...] = option(
        (),
        "Servers to watch. Default: one that runs on this machine; asks if there are several.",
        aliases=("--base-url",),
        argument=True,
        metavar="URL",
        subject="Servers",
        common=True,
    )
    api_key: str | None = option(
        None, "API key of the servers. TK_API_KEY keeps it out of ps.", metavar="KEY", common=True
    )
    admin_key: str | None = option(
        None,
        "Admin key of the servers. Live requests and settings need it if the server has one. "
        "TK_ADMIN_KEY keeps it out of ps.",
        metavar="KEY",
        common=True,
    )
    cacert: str | None = option(None, CACERT, metavar="FILE")
    insecure: bool = option(False, INSECURE)
    demo: bool = option(
        False, "Show made-up servers. Nothing is sent over the network.", common=True
    )
    interval: float = option(
        1.0,
        "Seconds between two readings of a server.",
        minimum=0.1,
        maximum=3600.0,
        subject="Display",
        common=True,
    )
    window: float = option(
        30.0,
        "Seconds that percentiles, means and hit rates cover.",
        minimum=1.0,
        maximum=3600.0,
        common=True,
    )
    theme: Literal["auto", "dark", "light"] = option(
        "auto", "Color theme. auto follows the terminal's background.", common=True
    )
    once: bool = option(
        False,
        "Print one plain snapshot and exit. Implied if the output is not a terminal.",
        subject="Output",
        common=True,
    )
    json: bool = option(False, "Print one snapshot as JSON and exit.", common=True)
    record: str | None = option(
        None,
        "Write every reading to this file. One line of JSON each.",
        metavar="FILE",
        common=True,
    )
    replay: str | None = option(
        None, "Show a recording. One reading every --interval seconds.", metavar="FILE", common=True
    )

    def __post_init__(self) -> None:
        check_all(self)
        urls = dict.fromkeys(server_url(one) for one in self.url)
        object.__setattr__(self, "url", tuple(urls))
        if self.replay is not None and (self.demo or self.record is not None):
            other = "--demo" if self.demo else "--record"
            raise ConfigError(
                f"--replay shows a recording and cannot be combined with {other}.", param="replay"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """Settings of the terminal chat."""

    model: str | None = option(
        None,
        "Model to talk to. If no server has it, a private server is started with it.",
        argument=True,
        may_be_prompt=True,
        aliases=("-m",),
        metavar="MODEL",
        subject="Server",
        common=True,
    )
    prompt: str | None = option(
        None,
        "Question to answer once (MODEL may be left out). Piped text is added to it.",
        argument=True,
        metavar="PROMPT",
        common=True,
    )
    url: str | None = option(
        None,
        "Server to use. Default: one that runs on this machine, else a private server.",
        aliases=("--base-url",),
        common=True,
    )
    api_key: str | None = option(None, "API key of the server. TK_API_KEY keeps it out of ps.")
    cacert: str | None = option(None, CACERT, metavar="FILE")
    insecure: bool = option(False, INSECURE)
    keep_alive: str = option(
        "5m",
        "Time that a private server stays after the last request: 30s, 5m, 1h; 0: it ends with the "
        "chat. It counts for the server that this chat starts.",
        metavar="TIME",
        common=True,
    )
    system: str | None = option(
        None,
        "System message at the start of the conversation.",
        aliases=("-s",),
        metavar="TEXT",
        subject="Conversation",
        common=True,
    )
    resume: bool = option(
        False, "Continue the last conversation.", aliases=("--continue", "-c"), common=True
    )
    temperature: float | None = option(
        None,
        "Sampling temperature; 0 is greedy decoding. Default: the server's.",
        aliases=("-t",),
        minimum=0.0,
        maximum=2.0,
        common=True,
    )
    max_tokens: int | None = option(
        None, "Maximum tokens per answer. Default: the server's.", minimum=1, common=True
    )
    top_p: float | None = option(
        None,
        "Sample from the likeliest tokens with this total probability. Default: the server's.",
        minimum=0.0,
        maximum=1.0,
    )
    top_k: int | None = option(
        None, "Sample from so many likeliest tokens; 0: all. Default: the server's.", minimum=0
    )
    min_p: float | None = option(
        None,
        "Sample from tokens with at least this share of the likeliest one's probability. Default: "
        "the server's.",
        minimum=0.0,
        maximum=1.0,
    )
    repetition_penalty: float | None = option(
        None,
        "Divide the scores of tokens that the text has already; 1: no penalty. Default: the "
        "server's.",
        minimum=0.001,
        maximum=1000.0,
    )
    seed: int | None = option(None, "Random seed, for reproducible answers.", minimum=0)
    tools: str | None = option(
        None, "Tools that the model may call: a JSON list in the API's format.", metavar="FILE"
    )
    context_policy: Literal["trim", "stop"] = option(
        "trim",
        "When the context is full, leave out the oldest turns (trim), or let the server refuse the "
        "question (stop).",
    )
    schema: str | None = option(
        None, "JSON schema that answers must match.", metavar="FILE", subject="Output", common=True
    )
    json: bool = option(
        False,
        "Print the answer as JSON, with tokens, times and reasoning.",
        common=True,
    )
    stream: bool = option(True, "Show an answer while it is generated.")
    reasoning: Literal["short", "full", "hidden"] = option(
        "short",
        "Show the model's reasoning folded when it has ended (short), completely, or not at all.",
    )

    def __post_init__(self) -> None:
        check_all(self)
        if self.url is None and self.model is not None:
            name = type(self.model)(without_latest(self.model))  # may be a `Word`
            object.__setattr__(self, "model", name)
        _ = self.keep_alive_seconds  # raises
        if self.url is not None:
            object.__setattr__(self, "url", server_url(self.url))

    @property
    def keep_alive_seconds(self) -> float:
        """Raises ConfigError for text that is no time."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", self.keep_alive.strip())
        if found is None:
            raise ConfigError(
                "--keep-alive must be a time such as 30s, 5m or 1h, or 0; got "
                f"{self.keep_alive!r}.",
                param="keep_alive",
            )
        return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]

    @property
    def word_hint(self) -> str:
        """End of an error message: in `tk chat WORD`, the word is the model's name."""
        if not isinstance(self.model, Word):
            return ""
        return f" ({self.model} was read as a model name; --prompt {self.model} asks a question.)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscribeConfig:
    """Settings of transcriptions."""

    files: tuple[str, ...] = option(
        (),
        "Sound files, or - for standard input. WAV always works; other formats need the extra "
        "audio.",
        argument=True,
        metavar="FILE",
        subject="Transcripts",
        common=True,
    )
    format: Literal["text", "json", "srt", "vtt", "verbose_json"] = option(
        "text",
        "Format of the transcripts. srt and vtt are subtitles.",
        aliases=("-f",),
        common=True,
    )
    output: str | None = option(
        None,
        "Folder for a transcript of each file, such as talk.srt for talk.wav. With one file, also "
        "a name such as talk.srt. Default: print them.",
        aliases=("-o",),
        metavar="PATH",
        common=True,
    )
    language: str | None = option(
        None,
        "Language of the sound: a code such as en, or its name. Default: it is detected.",
        aliases=("-l",),
        common=True,
    )
    translate: bool = option(False, "Translate into English.", common=True)
    prompt: str | None = option(
        None, "Text before the sound: names and a style for the transcript to follow.", common=True
    )
    transcription_fallback: bool = option(
        False,
        "Repeat bad transcripts at higher temperatures, and leave out sound without speech. Costs "
        "time.",
    )
    model: str | None = option(
        None,
        "Model that transcribes. If no server has it, a private server is started with it. "
        "Default: that of a server that runs.",
        aliases=("-m",),
        metavar="MODEL",
        subject="Server",
        common=True,
    )
    url: str | None = option(
        None,
        "tk server to use. Default: one that runs on this machine, else a private server.",
        aliases=("--base-url",),
        common=True,
    )
    api_key: str | None = option(None, "API key of the server. TK_API_KEY keeps it out of ps.")
    cacert: str | None = option(None, CACERT, metavar="FILE")
    insecure: bool = option(False, INSECURE)

    def __post_init__(self) -> None:
        check_all(self)
        if self.url is not None:
            object.__setattr__(self, "url", server_url(self.url))


def server_url(text: str) -> str:
    """Return the root URL of a server from `host:port` or a URL, with or without `/v1`.

    Raises ConfigError if it is not an http(s) address."""
    url = text.strip() if "://" in text else f"http://{text.strip()}"
    url = url.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # raises when it is not a port
    except ValueError as error:
        raise ConfigError(
            f"--url must be an address; got {text!r} ({error}).", param="url"
        ) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(
            f"--url must be an address such as {DEFAULT_URL}; got {text!r}.", param="url"
        )
    return url
