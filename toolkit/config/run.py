"""Settings of `tk run`."""

from dataclasses import dataclass

from toolkit.config.fields import check_all, option

DEFAULT_MAX_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Settings of one answer."""

    prompt: str | None = option(
        None,
        "Prompt to answer (MODEL may be left out if it has spaces). Piped text is added to it.",
        argument=True,
        metavar="PROMPT",
        subject="Answer",
        common=True,
    )
    system: str | None = option(
        None, "System message before the prompt.", aliases=("-s",), common=True
    )
    image: tuple[str, ...] = option(
        (),
        "Picture in front of the prompt, for a model that sees: PNG, JPEG, GIF or WebP. May be "
        "repeated.",
        metavar="FILE",
        common=True,
    )
    max_tokens: int | None = option(
        None,
        f"Maximum output in tokens. Default: {DEFAULT_MAX_TOKENS:,}, or the rest of the context if "
        "that is less.",
        minimum=1,
        common=True,
    )
    temperature: float = option(
        0.0,
        "Sampling temperature; 0 is greedy decoding.",
        aliases=("-t",),
        minimum=0.0,
        maximum=2.0,
        common=True,
    )
    top_p: float = option(
        1.0,
        "Sample from the likeliest tokens with this total probability.",
        minimum=0.0,
        maximum=1.0,
    )
    top_k: int = option(0, "Sample from so many likeliest tokens; 0: all.", minimum=0)
    min_p: float = option(
        0.0,
        "Sample from tokens with at least this share of the likeliest one's probability.",
        minimum=0.0,
        maximum=1.0,
    )
    repetition_penalty: float = option(
        1.0,
        "Divide the scores of tokens that the text has already; 1: no penalty.",
        minimum=0.001,
        maximum=1000.0,
    )
    raw: bool = option(False, "Continue the prompt without the chat template.")

    def __post_init__(self) -> None:
        check_all(self)
