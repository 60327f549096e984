"""`tk transcribe`: files, formats, servers, errors."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.records import recorded
from tests.speech.invented import FakeModel, Heard, number_of, spelled
from tests.speech.served import Served, serving, wav
from toolkit.chat.local import LocalServer
from toolkit.client.wire import ServerError
from toolkit.config.clients import TranscribeConfig
from toolkit.errors import ConfigError
from toolkit.transcribe import run as command

NAMES = ["Zero", "One", "Two"]


def reply(heard: Heard) -> tuple[list[int], float]:
    text = f" {NAMES[number_of(heard.clip)]}."
    return spelled(text) if heard.prompt[-1] == 265 else spelled(0.0, text, 1.0), -0.25


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served(FakeModel(reply))
    yield made
    made.close()


@pytest.fixture(scope="module")
def url(served: Served) -> Iterator[str]:
    with serving(served) as url:
        yield url


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Three files, whose texts are their numbers."""
    paths = [tmp_path / f"{number}.wav" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(wav(2.0, number))
    return [str(path) for path in paths]


def test_text_is_printed_alone(url, files, tk_here):
    done = tk_here("transcribe", files[1], "--url", url)
    assert (done.returncode, done.stdout) == (0, "One.\n")
    assert "1 file, 0:02 of sound in" in done.stderr
    assert "× real time" in done.stderr


def test_files_are_printed_in_order_and_errors_last(url, files, tmp_path, tk_here):
    wrong = tmp_path / "wrong.wav"
    wrong.write_bytes(b"no sound")
    missing = str(tmp_path / "missing.wav")
    done = tk_here("transcribe", files[2], missing, str(wrong), files[0], "--url", url)
    assert done.returncode == 1
    assert done.stdout == f"==> {files[2]} <==\nTwo.\n\n==> {files[0]} <==\nZero.\n\n"
    errors = done.stderr.splitlines()
    assert errors[0] == f"tk: {missing}: No such file or directory"
    assert errors[1].startswith(f"tk: {wrong} is not a sound file")
    assert errors[2].startswith("2 files, 0:04 of sound")


@pytest.mark.parametrize(
    ("format", "ending", "beginning"),
    [
        ("text", "txt", "One.\n"),
        ("srt", "srt", "1\n00:00:00,000 --> 00:00:01,000\nOne.\n"),
        ("vtt", "vtt", "WEBVTT\n\n00:00:00.000 -->"),
    ],
)
def test_output_is_a_file_for_each(url, files, tmp_path, tk_here, format, ending, beginning):
    folder = tmp_path / "new" / "folder"
    done = tk_here("transcribe", *files[:2], "--url", url, "-f", format, "-o", str(folder))
    assert done.returncode == 0
    assert done.stdout == f"{folder / f'0.{ending}'}\n{folder / f'1.{ending}'}\n"
    assert (folder / f"1.{ending}").read_text().startswith(beginning)


@pytest.mark.parametrize(("format", "has_segments"), [("json", False), ("verbose_json", True)])
def test_json_is_a_line_for_each_file(url, files, tk_here, format, has_segments):
    done = tk_here("transcribe", *files, "--url", url, "--format", format, "--language", "en")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["text"] for one in found] == ["Zero.", "One.", "Two."]
    assert all(("segments" in one) == has_segments and "type" not in one for one in found)


def test_options_reach_the_server(served, url, files, tk_here):
    served.engine.model.heard.clear()
    options = ["--translate", "-l", "German", "--prompt", "Hi", "--transcription-fallback"]
    assert tk_here("transcribe", files[0], "--url", url, *options).returncode == 0
    prompts = [one.prompt for one in served.engine.model.heard]
    assert [263, *b" Hi", 257, 259, 261, 265] in prompts
    assert [263, *b" Hi", 257, 264] in prompts


def test_standard_input_is_a_file(url, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(wav(1.0, 2))))
    assert command.run(TranscribeConfig(files=("-",), url=url)) == 0
    assert capfd.readouterr().out == "Two.\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"files": ()}, "There is no file"),
        ({"files": ("-", "-")}, "can be transcribed once"),
        ({"files": ("a.wav", "b.wav"), "format": "srt"}, "need --output DIR"),
        ({"files": ("a/x.wav", "b/x.wav"), "output": "."}, "same name.*: a/x.wav, b/x.wav"),
        ({"files": ("a.wav", "b.wav"), "output": "x.txt"}, "must be a folder"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings: dict[str, Any], message):
    with pytest.raises(ConfigError, match=message):
        command.run(TranscribeConfig(**settings))


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_output_that_is_no_folder_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("")
    config = TranscribeConfig(files=("a.wav",), output=str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"file.* cannot be made: "):
        command.run(config)


def test_files_that_differ_in_their_ending_keep_it(tmp_path):
    config = TranscribeConfig(files=("x.wav", "y/x.mp3", "z.wav"), output=str(tmp_path))
    outputs = [one.output.name for one in command.make_jobs(config)]
    assert outputs == ["x.wav.txt", "x.mp3.txt", "z.txt"]


def test_the_transcript_of_one_file_may_have_a_name(url, files, tmp_path, tk_here):
    path = tmp_path / "new" / "one.srt"
    done = tk_here("transcribe", files[1], "--url", url, "-f", "srt", "-o", str(path))
    assert done.stdout == f"{path}\n"
    assert path.read_text().startswith("1\n00:00:00,000")


def test_missing_files_and_folders_start_nothing(tmp_path, capfd):
    missing = str(tmp_path / "missing.wav")
    assert command.run(TranscribeConfig(files=(missing, str(tmp_path)), model="m")) == 1
    assert capfd.readouterr().err.splitlines() == [
        f"tk: {missing}: No such file or directory",
        f"tk: {tmp_path}: It is a folder; name its files",
    ]


def test_a_named_pipe_is_a_file(url, tmp_path, capfd):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(wav(1.0, 2),))
    writer.start()
    assert command.run(TranscribeConfig(files=(str(pipe),), url=url)) == 0
    writer.join()
    assert capfd.readouterr().out == "Two.\n"


def test_the_end_of_the_reader_ends_the_command(url, files, monkeypatch):
    def write(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=write, isatty=lambda: False))
    with pytest.raises(BrokenPipeError):
        command.run(TranscribeConfig(files=(files[0],), url=url))


def test_a_running_server_that_hears_is_found(url, files, tk_here):
    deaf = Served(FakeModel(reply), hearing=None, name="deaf")
    with serving(deaf) as other, recorded(other, "deaf"), recorded(url, "tiny"):
        assert tk_here("transcribe", files[1]).stdout == "One.\n"
        done = tk_here("transcribe", files[1], "--model", "deaf")
    deaf.close()
    assert done.returncode == 2
    assert "does not transcribe" in done.stderr


def test_without_server_and_model_nothing_starts(files):
    with pytest.raises(ServerError, match="no model is given"):
        command.run(TranscribeConfig(files=(files[0],)))


@pytest.mark.parametrize(
    ("given", "model"),
    [
        ("openai/whisper-tiny", "openai/whisper-tiny"),
        ("base.en", "openai/whisper-base.en"),
        ("turbo", "openai/whisper-large-v3-turbo"),
        ("other", "other"),
    ],
)
def test_a_private_server_starts_with_the_model(url, files, monkeypatch, capfd, given, model):
    started = []

    @contextmanager
    def start(model, *, tick, flags):
        started.append((model, flags))
        yield LocalServer(url, "key")

    monkeypatch.setattr(command, "local_server", start)
    monkeypatch.setattr("toolkit.hub.download_missing", started.append)
    assert command.run(TranscribeConfig(files=(files[1],), model=given)) == 0
    assert started == [model, (model, command.NO_LIMITS)]
    assert capfd.readouterr().out == "One.\n"


def test_a_server_that_ends_fails_the_files(files, tk_here):
    done = tk_here("transcribe", files[0], "--url", "http://127.0.0.1:1")
    assert done.returncode == 2
    assert "No server answers" in done.stderr
