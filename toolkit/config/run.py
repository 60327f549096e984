"""What can be set of `tk run`."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.fields import check_all, option


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One answer."""

    prompt: str | None = option(
        None,
        "What to say. Without it, or with more on standard input, that is read too.",
        argument=True,
        metavar="PROMPT",
        subject="Answer",
        common=True,
    )
    system: str | None = option(None, "A system message before the prompt.", common=True)
    max_tokens: int | None = option(
        None, "Longest answer, in tokens. Default: what the context holds.", minimum=1, common=True
    )
    temperature: float = option(
        0.0, "0 always takes the likeliest token.", minimum=0.0, maximum=2.0, common=True
    )
    top_p: float = option(1.0, "Share of the probability to draw from.", minimum=0.0, maximum=1.0)
    raw: bool = option(
        False, "Continue the prompt as it stands, without the model's chat template."
    )

    def __post_init__(self) -> None:
        check_all(self)
