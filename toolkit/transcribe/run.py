"""Transcribe files by a server that runs on this machine, or by a private one."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from toolkit.chat.answers.client import Address, ModelInfo
from toolkit.chat.local import exit_on_signals, local_server
from toolkit.chat.screen.starting import show_progress
from toolkit.chat.screen.terminal import Terminal
from toolkit.client.choice import choose_server, ready_servers
from toolkit.client.trust import Trust
from toolkit.client.wire import ServerError
from toolkit.config.clients import TranscribeConfig
from toolkit.errors import ConfigError, ToolkitError
from toolkit.files import failure
from toolkit.logs import escape_controls, escape_line
from toolkit.transcribe.client import EXTENSIONS, TranscriptionClient, Wishes, to_format
from toolkit.transcribe.progress import ProgressDisplay

STDIN = "-"
TASK = "transcription"
MAX_FILES = 8  # that the server has at once; it transcribes many windows of each together
WHISPER_NAMES = re.compile(r"(tiny|base|small|medium)(\.en)?|large(-v[123])?|(large-v3-)?turbo")
OTHER_WHISPER_NAMES = {"large": "large-v3", "turbo": "large-v3-turbo", "large-v1": "large"}
NO_LIMITS = ("--max-audio-mb", "16384", "--max-audio-seconds", "86400")
"""Flags of a private server: the files are the user's own."""


def run(config: TranscribeConfig) -> int:
    """Transcribe the files. Return the exit code: 1 if one of them failed."""
    jobs = make_jobs(config)
    if all(job.error is not None for job in jobs):
        return _report(jobs)
    config = replace(config, model=_hub_name(config))
    with exit_on_signals(signal.SIGTERM, signal.SIGHUP), find_server(config) as (address, model):
        wishes = Wishes(
            model=model.name,
            format=config.format,
            language=config.language,
            prompt=config.prompt,
            translate=config.translate,
            fallback=config.transcription_fallback or None,
        )
        return asyncio.run(_transcribe_all(address, wishes, jobs))


@dataclass(slots=True)
class Job:
    """A file to transcribe."""

    name: str  # as given
    output: Path | None  # None: stdout
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    text: str = ""  # complete, in the format
    error: str | None = None

    def __post_init__(self) -> None:
        if self.name != STDIN:
            try:
                is_folder = stat.S_ISDIR(self._path.stat().st_mode)
            except OSError as error:
                self.error = error.strerror
            else:
                self.error = "It is a folder; name its files" if is_folder else None

    @property
    def _path(self) -> Path:
        return Path(self.name).expanduser()

    def open(self) -> BinaryIO:
        """Open the file. A pipe is copied: a request begins with its length. Raises OSError."""
        if self.name == STDIN:
            return _copy(sys.stdin.buffer)
        file = self._path.open("rb")
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        with file:
            return _copy(file)


def _copy(source: BinaryIO) -> BinaryIO:
    """Return a file with what a pipe has, on the disk if it is large."""
    file = tempfile.SpooledTemporaryFile(2**24)  # noqa: SIM115  (closed by the caller)
    shutil.copyfileobj(source, file)
    file.seek(0)
    return cast(BinaryIO, file)


def make_jobs(config: TranscribeConfig) -> list[Job]:
    """Return a job for each file. Raises ConfigError for settings that exclude each other."""
    if not config.files:
        raise ConfigError(
            "There is no file: tk transcribe FILE, or - for standard input.", param="files"
        )
    if config.files.count(STDIN) > 1:
        raise ConfigError("Standard input (-) can be transcribed once.", param="files")
    if config.output is None:
        if len(config.files) > 1 and config.format in ("srt", "vtt"):
            raise ConfigError(
                f"Several files as {config.format} need --output DIR, a file for each.",
                param="output",
            )
        return [Job(name, None) for name in config.files]
    outputs = _outputs(config.files, Path(config.output).expanduser(), EXTENSIONS[config.format])
    try:
        outputs[0].parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--output: the folder {outputs[0].parent} cannot be made: {failure(error)}.",
            param="output",
        ) from None
    return [Job(name, output) for name, output in zip(config.files, outputs, strict=True)]


def _outputs(files: Sequence[str], target: Path, ending: str) -> list[Path]:
    """Return the transcripts' paths: in a folder, or one that --output names.

    Raises ConfigError if one would replace another."""
    if target.suffix == f".{ending}" and not target.is_dir():
        if len(files) > 1:
            raise ConfigError(
                f"--output must be a folder for several files; got {target}.", param="output"
            )
        return [target]
    paths = [Path("stdin") if name == STDIN else Path(name) for name in files]
    stems = Counter(path.stem for path in paths)
    names = [path.stem if stems[path.stem] == 1 else path.name for path in paths]  # a.wav, a.mp3
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        same = ", ".join(file for file, name in zip(files, names, strict=True) if name == twice)
        raise ConfigError(
            f"These files have the same name, so that one transcript would replace the other: "
            f"{same}. Transcribe them with one --output each.",
            param="files",
        )
    return [target / f"{name}.{ending}" for name in names]


def _hub_name(config: TranscribeConfig) -> str | None:
    """Return the model's name. OpenAI's names of models, such as tiny.en, become those on the hub,
    unless a server or a folder has the name."""
    name = config.model
    if name is None or config.url is not None or Path(name).exists():
        return name
    if WHISPER_NAMES.fullmatch(name) is None or any(one.has(name) for one in ready_servers()):
        return name
    return f"openai/whisper-{OTHER_WHISPER_NAMES.get(name, name)}"


@contextmanager
def find_server(config: TranscribeConfig) -> Iterator[tuple[Address, ModelInfo]]:
    """Yield a server and a model that hears: at --url, else one that runs, else a private one.

    Raises ServerError and ConfigError."""
    found = _at(config.url, config) if config.url is not None else _find_running(config)
    if found is not None:
        yield found
        return
    if config.model is None:
        raise ServerError(
            "No server that transcribes runs on this machine, and no model is given. Give one, "
            "such as --model openai/whisper-tiny, or start a server: tk serve openai/whisper-tiny."
        )
    from toolkit.hub import download_missing

    download_missing(config.model)
    terminal = Terminal()
    with (
        show_progress(terminal, f"Starting {config.model}") as tick,
        local_server(config.model, tick=tick, flags=NO_LIMITS) as server,
    ):
        tick(-1.0, "")
        address = Address(server.url, server.api_key)
        yield address, _require_hearing(address, address.list_models()[0])


def _at(url: str, config: TranscribeConfig) -> tuple[Address, ModelInfo]:
    """Return the server at a URL, and the model that is wanted or hears."""
    address = Address(url, config.api_key, Trust(config.cacert, config.insecure))
    models = address.list_models()
    if config.model is not None:
        named = (one for one in models if config.model in (one.name, one.root))
        return address, _require_hearing(address, next(named, ModelInfo(config.model)))
    hearing = (one for one in models if one.tasks is None or TASK in one.tasks)
    return address, _require_hearing(address, next(hearing, models[0]))


def _find_running(config: TranscribeConfig) -> tuple[Address, ModelInfo] | None:
    """Return a server of this machine that has the model, or one that hears; None if none has."""
    if config.model is not None:
        if not any(one.has(config.model) for one in ready_servers()):
            return None
        server = choose_server(config.model)
        return None if server is None else _at(server.url, config)
    found = []
    for one in ready_servers():
        with suppress(ServerError):  # it does not hear, needs a key, or has ended
            found.append(_at(one.url, config))
    if len(found) > 1:
        urls = ", ".join(f"{model.name} at {address.url}" for address, model in found)
        raise ConfigError(
            f"{len(found)} servers transcribe: {urls}. Choose with --url.", param="url"
        )
    return found[0] if found else None


def _require_hearing(address: Address, model: ModelInfo) -> ModelInfo:
    """Return the model. Raises ServerError if its server says that it does not hear."""
    if model.tasks is None or TASK in model.tasks:
        return model
    raise ServerError(
        f"{model.name} at {address.title} does not transcribe: it takes no sound. Models such as "
        "openai/whisper-tiny do."
    )


async def _transcribe_all(address: Address, wishes: Wishes, jobs: Sequence[Job]) -> int:
    """Transcribe all files, several at once, and print or write them in order."""
    client = TranscriptionClient(address)
    prints_live = len(jobs) == 1 and jobs[0].output is None and wishes.format == "text"
    display = ProgressDisplay(is_shown=not (prints_live and sys.stdout.isatty()))
    free = asyncio.Semaphore(MAX_FILES)

    async def transcribe(job: Job) -> None:
        async with free:
            try:
                if job.error is None:
                    await _transcribe(client, wishes, job, display, prints_live=prints_live)
            except BrokenPipeError:  # the reader of stdout has ended
                raise
            except ToolkitError as error:
                job.error = str(error)
            except OSError as error:
                job.error = failure(error)
            finally:
                job.ended.set()

    tasks = [asyncio.ensure_future(transcribe(job)) for job in jobs]
    try:
        with display:
            for job in jobs:
                await job.ended.wait()
                if job.error is None and not prints_live:
                    with display.hidden():
                        _print(job, has_heading=len(jobs) > 1 and wishes.format == "text")
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()
    code = _report(jobs)
    num_good = sum(job.error is None for job in jobs)
    if num_good:
        print(display.summary(num_good), file=sys.stderr)
    return code


def _report(jobs: Sequence[Job]) -> int:
    """Print the files that failed. Return the exit code."""
    failed = [job for job in jobs if job.error is not None]
    for job in failed:
        error = str(job.error)
        # A server's errors begin with the form's field.
        what = error[4:] if error.startswith("file ") else f": {error}"
        name = "stdin" if job.name == STDIN else job.name
        print(escape_line(f"tk: {name}{what}"), file=sys.stderr)
    return 1 if failed else 0


async def _transcribe(
    client: TranscriptionClient,
    wishes: Wishes,
    job: Job,
    display: ProgressDisplay,
    *,
    prints_live: bool,
) -> None:
    """Transcribe a file. Raises ToolkitError and OSError."""
    done: dict[str, Any] = {}
    with await asyncio.to_thread(job.open) as file, display.file(job.name) as progress:
        name = os.path.basename(job.name)
        async with aclosing(client.transcribe(file, name, wishes)) as steps:
            async for step in steps:
                if prints_live:
                    _write(step.text)
                if step.seconds is not None and step.total_seconds is not None:
                    progress.update(step.seconds, step.total_seconds)
                done = step.done or done
    job.text = to_format(done, wishes.format)
    if prints_live:
        _write("\n")
    if job.output is not None:
        await asyncio.to_thread(job.output.write_text, job.text, encoding="utf-8")


def _print(job: Job, *, has_heading: bool) -> None:
    """Print the transcript, or the name of the file that has it."""
    if job.output is not None:
        print(escape_line(str(job.output)))
        return
    _write(f"==> {escape_line(job.name)} <==\n{job.text}\n" if has_heading else job.text)


def _write(text: str) -> None:
    sys.stdout.write(escape_controls(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
