"""Command lines of OpenAI's whisper and whisper.cpp: honoured, without effect, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli.test_vllm_flags import command_of, flags_of, settings
from toolkit.cli.help import settings_of
from toolkit.cli.vllm import TABLES, translate
from toolkit.config.whisper import TRANSCRIBE
from toolkit.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "--model turbo --language German --task translate --output_format vtt -o x",
            {
                "model": "turbo",
                "language": "German",
                "translate": True,
                "format": "vtt",
                "output": "x",
            },
        ),
        ("--output_format txt --output_dir y", {"format": "text", "output": "y"}),
        ("-f txt --initial_prompt Dr.", {"format": "text", "prompt": "Dr."}),
        ("-f srt --format json", {"format": "json"}),
        ("-m m -l auto -tr -osrt -t 4", {"model": "m", "language": "auto", "translate": True,
                                         "format": "srt"}),
        ("--task transcribe --fp16 False --word_timestamps False --beam_size 5", {}),
    ],
)  # fmt: skip
def test_command_lines_of_whisper(line: str, expected: dict[str, Any]):
    assert settings("transcribe", line.split()) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--output_format all", "tk has no --output-format all. Formats are"),
        ("--word_timestamps True", "timestamp_granularities"),
        ("-of name", "--output takes"),
    ],
)
def test_flags_that_are_missing_name_another_way(line: str, message: str):
    with pytest.raises(ConfigError, match=message):
        settings("transcribe", line.split())


def test_flags_without_effect_are_noted():
    rows = settings_of(command_of("transcribe"))
    rest, notes = translate(["--verbose", "False", "-np"], rows, "transcribe")
    assert rest == []
    assert [note.partition(" has no effect")[0] for note in notes] == ["--verbose", "-np"]


def test_flags_of_tk_keep_their_meaning():
    assert TABLES["transcribe"] is TRANSCRIBE
    own = flags_of("transcribe")
    flags = {flag for _, line in TRANSCRIBE for flag in line.split()}
    assert {flag for flag in flags if flag.partition("=")[0] in own} == {"-f=txt", "--format=txt"}
