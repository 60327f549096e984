"""`tk run`."""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from toolkit.cli.command import command
from toolkit.cli.commands.chat import prepare_chat
from toolkit.cli.help import known_settings
from toolkit.cli.root import app, tree
from toolkit.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    SchedulerConfig,
)
from toolkit.config.clients import ChatConfig
from toolkit.config.engine import DEMO
from toolkit.config.fields import build, options
from toolkit.config.run import DEFAULT_MAX_TOKENS
from toolkit.config.sources import resolve
from toolkit.console import as_text, read_piped
from toolkit.errors import ConfigError, InvalidRequestError, ModelNotFoundError
from toolkit.logs import escape_controls

if TYPE_CHECKING:
    from toolkit.engine.front.input_processor import TokensPrompt


@command(
    app, "run", ModelConfig, RunConfig, DeviceConfig, CacheConfig, SchedulerConfig, ParallelConfig
)
def run(
    model: ModelConfig,
    config: RunConfig,
    device: DeviceConfig,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    parallel: ParallelConfig,
) -> None:
    """Answer one prompt and exit, or open a chat.

    The answer is streamed to stdout. Text piped to standard input is added to the prompt. Without a
    prompt, at a terminal, it is tk chat MODEL; settings of the engine are those of its server."""
    settings = (model, device, cache, scheduler, parallel)
    if config.prompt is None and sys.stdin is not None and sys.stdin.isatty():
        raise typer.Exit(_open_chat(config, settings))
    prompt = _read_prompt(config.prompt, model.model)
    pictures = _read_pictures(config.image)

    from toolkit.hub import download_missing

    engine = EngineConfig(
        model=model, device=device, cache=cache, scheduler=scheduler, parallel=parallel
    ).with_settings(max_num_seqs=1, limit_mm_per_prompt={"image": len(pictures)})
    try:
        download_missing(model.model, model.revision)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(error.message + _server_hint(str(model.model))) from None
    with _starting(model.model or DEMO):
        from toolkit.engine.llm import LLM
        from toolkit.sampling.params import SamplingParams

        llm = LLM(config=engine)
    given: TokensPrompt
    if config.raw or llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        if config.system is not None:
            raise InvalidRequestError(
                "--system needs a model with a chat template, and no --raw.", param="system"
            )
        if pictures:
            raise InvalidRequestError(
                "--image needs a model with a chat template, and no --raw.", param="image"
            )
        given = {"prompt_token_ids": llm.tokenize(prompt)}
    else:
        system = []
        if config.system is not None:
            system = [{"role": "system", "content": as_text(config.system)}]
        content = [*pictures, {"type": "text", "text": prompt}] if pictures else prompt
        given = llm.chat_input([*system, {"role": "user", "content": content}])
    room = llm.info.max_model_len - len(given["prompt_token_ids"])
    params = SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        max_tokens=config.max_tokens or min(DEFAULT_MAX_TOKENS, max(1, room)),
        seed=model.seed,
    )
    is_terminal = sys.stdout.isatty()
    answer: list[int] = []
    period = 0
    try:
        for delta in llm.stream(given, params):
            print(escape_controls(delta.text) if is_terminal else delta.text, end="", flush=True)
            answer += delta.token_ids
            if config.max_tokens is None and (period := find_cycle(answer)):
                break
        print()
        if period:
            print(
                f"tk: stopped, since the answer repeats its last {period} tokens again and again. "
                "--repetition-penalty 1.1 may help; --max-tokens sets a limit instead.",
                file=sys.stderr,
            )
    except BrokenPipeError:
        sys.stderr.close()  # suppress the error of the flush at exit


def _server_hint(model: str) -> str:
    """Return a sentence about a running server that has the model, else ""."""
    from toolkit.client.choice import ready_servers

    if not any(server.has(model) for server in ready_servers()):
        return ""
    return (
        " A server of yours has it, and tk run uses none; this asks it: tk chat "
        f"{shlex.quote(model)} PROMPT"
    )


@contextmanager
def _starting(name: str) -> Iterator[None]:
    """Show the progress of the engine's start."""
    from toolkit.chat.screen.starting import show_progress, ticking
    from toolkit.chat.screen.terminal import Terminal

    with show_progress(Terminal(), f"Starting {name}") as tick, ticking(tick):
        yield


def _open_chat(config: RunConfig, settings: Sequence[Any]) -> int:
    """Run `tk chat`. Raises ConfigError for settings that it does not have."""
    given = _changed(config)
    for name in ("raw", "image"):
        if name in given:
            raise ConfigError(f"--{name} needs a prompt: tk run MODEL PROMPT.", param=name)
    from toolkit.chat.run import run as chat

    given["model"] = settings[0].model or DEMO
    chosen = resolve(options(ChatConfig), given, ("chat",), known_settings(tree()))
    values = {name: one.value for name, one in chosen.items()}
    # The model runs on this machine, as with a prompt.
    config_of_chat = build(ChatConfig, values | {"url": None})
    flags = [flag for one in settings for flag in _flags(one)]
    return chat(config_of_chat, prepare=prepare_chat, flags=flags)


def _changed(config: Any) -> dict[str, Any]:
    """Return the settings of a config that differ from their defaults."""
    rows = options(type(config))
    return {row.name: value for row in rows if (value := getattr(config, row.name)) != row.default}


def _flags(config: Any) -> Iterator[str]:
    """Yield the flags of a config's settings that differ from their defaults, but the model."""
    for name, value in _changed(config).items():
        flag = "--" + name.replace("_", "-")
        if name == "model":
            continue
        if isinstance(value, bool):
            yield flag if value else flag.replace("--", "--no-", 1)
        else:
            several = value if isinstance(value, tuple) else (value,)
            for one in several:
                yield from (flag, json.dumps(one) if isinstance(one, dict) else str(one))


def _read_pictures(files: Sequence[str]) -> list[dict[str, Any]]:
    """Return parts of a message. Raises InvalidRequestError for a file that is no picture."""
    if not files:
        return []
    from toolkit.chat.images import to_data_url

    urls = (to_data_url(Path(as_text(file)).expanduser()) for file in files)
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def _read_prompt(given: str | None, model: str | None) -> str:
    """Return the prompt and piped text, joined. Raises InvalidRequestError if both are empty."""
    piped = (read_piped() or "").rstrip("\n")
    prompt = "\n\n".join(part for part in (as_text(given or ""), piped) if part)
    if not prompt:
        hint = "" if model is None else f" {model!r} is taken as the model; see --prompt."
        raise InvalidRequestError(
            f'There is no prompt: tk run MODEL "prompt", or pipe it in.{hint}'
        )
    return prompt


CYCLE_TOKENS = 200
LEAST_REPEATS = 3


def find_cycle(tokens: Sequence[int]) -> int:
    """Return the length of a cycle that the last tokens repeat LEAST_REPEATS times; 0: none."""
    last = tokens[-CYCLE_TOKENS:]
    if len(last) < CYCLE_TOKENS:
        return 0
    for period in range(1, CYCLE_TOKENS // LEAST_REPEATS + 1):
        if last[period:] == last[:-period]:
            return period
    return 0
