"""Sound files to samples: formats, headers of pipes, ends that are missing, and bombs."""

from __future__ import annotations

import contextlib
import re
import struct
import sys

import numpy as np
import pytest

from tests.speech.files import FULL, encoded, tone, written
from toolkit.speech.sound import decode
from toolkit.speech.wave_file import SoundError

HOUR = 3600.0


def with_rate(rate: int) -> bytes:
    """Return a WAV file with this rate in its header."""
    file = bytearray(written(tone(0.1, 16_000), 16_000))
    struct.pack_into("<I", file, 24, rate)
    return bytes(file)


def difference(found: np.ndarray) -> float:
    """Return the largest difference from a tone of any delay, in parts of full scale."""
    middle = found[3000:12_000] / FULL
    waves = np.exp(2j * np.pi * 440 / 16_000 * np.arange(len(middle)))
    part = 2 * np.mean(middle * waves.conj())
    assert abs(part) == pytest.approx(0.5, rel=0.06)  # LAME's encoder is quieter
    return float(np.abs(middle - (part * waves).real).max())


@pytest.mark.parametrize(
    ("kind", "subtype", "most"),
    [
        ("WAV", "PCM_U8", 0.01), ("WAV", "PCM_16", 1e-4), ("WAV", "PCM_24", 1e-4),
        ("WAV", "PCM_32", 1e-4), ("WAV", "FLOAT", 1e-4), ("WAV", "DOUBLE", 1e-4),
        ("WAV", "ULAW", 0.02), ("WAV", "ALAW", 0.02), ("WAVEX", "PCM_24", 1e-4),
        ("RF64", "PCM_16", 1e-4), ("FLAC", "PCM_16", 1e-4), ("FLAC", "PCM_24", 1e-4),
        ("MP3", "MPEG_LAYER_III", 0.02), ("OGG", "VORBIS", 0.02),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (44_100, 2)])
def test_formats_of_libsndfile_are_decoded(
    kind: str, subtype: str, most: float, rate: int, channels: int
):
    samples = np.stack([tone(1.5, rate)] * channels, axis=1)
    found = decode(written(samples, rate, kind, subtype), HOUR)
    assert found.dtype == np.int16
    assert abs(len(found) - 24_000) < 1600
    assert difference(found) < most


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("mp4", "aac"), ("mov", "aac"), ("mp4", "alac"), ("adts", "aac"), ("webm", "libopus"),
        ("matroska", "flac"), ("ogg", "libopus"), ("mp3", "mp3"),
    ],
)  # fmt: skip
def test_formats_of_ffmpeg_are_decoded(container: str, codec: str):
    found = decode(encoded(container, codec, video=container == "mov"), HOUR)
    assert abs(len(found) - 16_000) < 1600
    assert difference(found) < 0.03


def test_samples_of_16_khz_are_kept_exactly():
    samples = np.random.default_rng(0).integers(-FULL, FULL, 5000).astype(np.int16)
    np.testing.assert_array_equal(decode(written(samples, 16_000), HOUR), samples)


@pytest.mark.parametrize("subtype", ["PCM_16", "FLOAT"])
def test_channels_are_mixed_by_their_mean(subtype: str):
    samples = np.stack([tone(1.0, 16_000), np.zeros(16_000), tone(1.0, 16_000) / 2], axis=1)
    found = decode(written(samples, 16_000, "WAV", subtype), HOUR)
    np.testing.assert_allclose(found / FULL, tone(1.0, 16_000) / 2, atol=1e-4)


def test_floats_beyond_full_scale_are_clipped():
    samples = np.array([0.5, 2.0, -3.0, np.nan, np.inf, -np.inf])
    found = decode(written(samples, 16_000, "WAV", "FLOAT"), HOUR)
    assert found.tolist() == [FULL // 2, FULL - 1, -FULL, 0, FULL - 1, -FULL]


def test_192_khz_of_eight_channels_is_decoded():
    samples = np.stack([tone(1.0, 192_000)] * 8, axis=1)
    assert difference(decode(written(samples, 192_000, "WAV", "PCM_24"), HOUR)) < 1e-4


@pytest.mark.parametrize("size", [0, 1000, 2**31 - 1, 2**32 - 1])
def test_size_in_the_header_of_a_pipe_is_not_needed(size: int):
    file = bytearray(written(tone(0.1, 16_000), 16_000))
    place = file.index(b"data") + 4
    file[place : place + 4] = struct.pack("<I", size)
    assert len(decode(file, HOUR)) == (500 if size == 1000 else 1600)


@pytest.mark.parametrize(
    ("kind", "subtype"),
    [("WAV", "PCM_24"), ("FLAC", "PCM_16"), ("MP3", "MPEG_LAYER_III"), ("OGG", "VORBIS")],
)
def test_file_that_is_cut_gives_its_beginning(kind: str, subtype: str):
    noise = np.random.default_rng(0).normal(0, 0.1, 8 * 16_000)
    file = written(noise, 16_000, kind, subtype)
    found = decode(file[: len(file) // 2 + 1], HOUR)
    assert 32_000 <= len(found) <= 72_000


@pytest.mark.parametrize(("container", "codec"), [("adts", "aac"), ("webm", "libopus")])
def test_stream_that_is_cut_gives_its_beginning(container: str, codec: str):
    file = encoded(container, codec, seconds=3.0)
    assert 20_000 <= len(decode(file[: len(file) // 2 + 1], HOUR)) <= 28_000


def test_chunks_before_the_samples_are_skipped():
    file = written(tone(0.1, 16_000), 16_000)
    place = file.index(b"data")
    odd = b"LIST" + struct.pack("<I", 5) + b"aaaaa\0"
    assert len(decode(file[:place] + odd + file[place:], HOUR)) == 1600


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        (b"", "is an empty file"),
        (b"\0", "is not a sound file that can be read: its first bytes are '\\x00'"),
        (b"#EXTM3U\n/etc/passwd", "is not a sound file"),
        (b"ffconcat version 1.0\nfile '/etc/passwd'", "is not a sound file"),
        (b"%PDF-1.7 and so on", "is not a sound file"),
        (b"RIFF\0\0\0\0WAVE", "is a WAV file that is truncated or damaged: it has no format"),
        (written(tone(0, 16_000), 16_000), r"is a sound file (WAV) without sound"),
        (written(tone(0.1, 500), 500), "has 500 samples per second"),
        (with_rate(0), "has 0 samples per second"),
        (written(tone(0.1, 8000), 8000, "WAV", "IMA_ADPCM"), "format 0x11 with 4 bits"),
        (b"RIFF\0\0\0\0WAVE" + b"junk\0\0\0\0" * 2000, "it has no format"),
        (b"fLaC" + bytes(100), r"is a file (FLAC) that is truncated or damaged"),
        (b"OggS" + bytes(100), r"is a file (Ogg) that is truncated or damaged"),
        (b"ID3\4\0\0\0\0\0\1x" + bytes(100), r"(MP3) that is truncated or damaged"),
        (b"\0\0\0\x20ftypisom" + bytes(100), r"(MP4) that is truncated or damaged"),
        (encoded("mp4", "", video=True), "none of its streams is audio"),
        (encoded("mp4", "ac3"), "whose codec, ac3, is not supported"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_file_that_cannot_be_decoded_is_refused(file: bytes, problem: str):
    with pytest.raises(SoundError, match=re.escape(problem)):
        decode(file, HOUR)


@pytest.mark.parametrize("kind", ["WAV", "FLAC"])
def test_sound_beyond_the_limit_is_refused_early(kind: str):
    file = written(np.zeros(600 * 8000), 8000, kind)
    with pytest.raises(SoundError, match=r"has more than 60 seconds of sound"):
        decode(file, 60.0)


@pytest.mark.parametrize(
    ("kind", "file", "module"),
    [
        ("FLAC", written(tone(0.1, 16_000), 16_000, "FLAC"), "soundfile"),
        ("MP4", encoded("mp4", "aac", seconds=0.1), "av"),
    ],
)
def test_missing_extra_is_named(
    kind: str, file: bytes, module: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SoundError, match=rf"is a file \({kind}\) .* lacks the extra `audio`"):
        decode(file, HOUR)
    assert len(decode(written(tone(0.1, 16_000), 16_000), HOUR)) == 1600


def test_damaged_files_give_sound_or_an_error():
    random = np.random.default_rng(0)
    files = [
        written(tone(0.5, 16_000), 16_000),
        written(tone(0.5, 16_000), 16_000, "FLAC"),
        written(tone(0.5, 16_000), 16_000, "OGG", "VORBIS"),
        encoded("mp4", "aac", seconds=0.5),
        encoded("webm", "libopus", seconds=0.5),
    ]
    for number in range(100):
        file = bytearray(files[number % len(files)])
        for place in random.integers(0, len(file), 10):
            file[place] = random.integers(256)
        with contextlib.suppress(SoundError):
            assert len(decode(file, 60.0))
