"""Sound files to mono samples at 16 kHz: WAV, and other formats by the extra `audio`.

Only in a worker, whose memory and time are limited. The format is found by the first bytes, never
by a name, and read from memory alone: some formats of FFmpeg are lists of files and URLs."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.speech.clip import SAMPLE_RATE
from toolkit.speech.resample import MAX_RATE, MIN_RATE, Resampler
from toolkit.speech.wave_file import Block, SoundError, read_wave, to_finite

SUPPORTED = "WAV, FLAC, MP3, Ogg (Vorbis, Opus), MP4 (AAC), AAC and WebM"
_BLOCK = 2**16  # frames that are resampled at once
_READ = (
    2**12
)  # frames that libsndfile decodes at once: none of them is found if the file ends there
_CODECS = "aac,alac,flac,mp3,mp3float,opus,libopus,vorbis,pcm_s16le,pcm_s16be,pcm_s24le,pcm_f32le"
"""Codecs of FFmpeg that are used."""
_DEMUXERS = {"MP4": "mov", "AAC": "aac", "WebM": "matroska"}
"""Formats that FFmpeg reads, and its name of each."""
_MP4_BOXES = {b"ftyp", b"moov", b"mdat", b"wide"}
_ID3_HEADER = 10  # bytes
_INTEGERS = {"uint8": 2**7, "int16": 2**15, "int32": 2**31}


def decode(data: bytes | bytearray, max_seconds: float) -> npt.NDArray[np.int16]:
    """Return the samples of a file, its channels mixed. Raises SoundError.

    A file that is cut off, or damaged after its beginning, gives what can be decoded."""
    kind = find_format(data)
    collected = _Samples(max_seconds)
    if kind == "WAV":
        blocks = read_wave(memoryview(data))
    elif kind in _DEMUXERS:
        blocks = _merged(_read_by_ffmpeg(data, kind))
    else:
        blocks = _merged(_read_by_libsndfile(data, kind))
    for rate, block in blocks:
        collected.add(rate, block)
    return collected.finish(kind)


def find_format(data: bytes | bytearray) -> str:
    """Return the name of a file's format. Raises SoundError."""
    if not data:
        raise SoundError("is an empty file")
    head = bytes(data[:12])
    if head[:4] in (b"RIFF", b"RF64") and head[8:] == b"WAVE":
        return "WAV"
    if head[:3] == b"ID3":
        return _format_after_tag(data)
    if head[:4] == b"fLaC":
        return "FLAC"
    if head[:4] == b"OggS":
        return "Ogg"
    if head[4:8] in _MP4_BOXES:
        return "MP4"
    if head[:4] == b"\x1aE\xdf\xa3":
        return "WebM"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        if head[1] & 0xF6 == 0xF0:
            return "AAC"
        if head[1] & 0x06:
            return "MP3"
    shown = repr(head)[1:]
    raise SoundError(
        f"is not a sound file that can be read: its first bytes are {shown}; {SUPPORTED} are "
        "supported"
    )


def _format_after_tag(data: bytes | bytearray) -> str:
    """Return the format behind an ID3 tag: MP3 files begin with one, others may."""
    size = 0
    for byte in data[6:_ID3_HEADER]:
        size = size << 7 | byte & 0x7F
    rest = bytes(data[_ID3_HEADER + size :][:12])
    if rest[:1] == b"\xff" or rest[:4] == b"fLaC":
        return find_format(rest)
    return "MP3"


class _Samples:
    """Mono samples at 16 kHz, of at most a number of seconds."""

    def __init__(self, max_seconds: float) -> None:
        self._max_seconds = max_seconds
        self._rate: int | None = None
        self._resampler = Resampler(SAMPLE_RATE)
        self._data = bytearray()

    def add(self, rate: int, block: Block) -> None:
        """Append samples of a rate: [n, channels]."""
        if rate != self._rate:
            if not MIN_RATE <= rate <= MAX_RATE:
                raise SoundError(
                    f"has {rate:,} samples per second; {MIN_RATE:,} to {MAX_RATE:,} are supported"
                )
            self._append(self._resampler.finish())
            self._rate, self._resampler = rate, Resampler(rate)
        if rate == SAMPLE_RATE and block.dtype == np.int16 and block.shape[1] == 1:
            self._append(block[:, 0])
        else:
            self._append(self._resampler.feed(_mixed(block)))

    def finish(self, kind: str) -> npt.NDArray[np.int16]:
        """Return all samples. Raises SoundError if there are none."""
        self._append(self._resampler.finish())
        if not self._data:
            raise SoundError(f"is a sound file ({kind}) without sound")
        return np.frombuffer(self._data, np.int16)

    def _append(self, samples: Block) -> None:
        if samples.dtype != np.int16:
            scaled = np.rint(samples * np.float32(2**15))
            samples = np.clip(scaled, -(2**15), 2**15 - 1).astype(np.int16)
        self._data += np.ascontiguousarray(samples).view(np.uint8).data
        if len(self._data) > 2 * SAMPLE_RATE * self._max_seconds:
            raise SoundError(
                f"has more than {self._max_seconds:,g} seconds of sound, which is the limit "
                "(--max-audio-seconds)"
            )


def _mixed(block: Block) -> npt.NDArray[np.float32]:
    """Return the mean of the channels, as floats."""
    full = 2**15 if block.dtype == np.int16 else 1
    num_channels = block.shape[1]
    if num_channels == 1:
        return block[:, 0].astype(np.float32) * np.float32(1 / full)
    mixed: npt.NDArray[np.float32] = block.astype(np.float32) @ np.full(
        num_channels, 1 / (num_channels * full), np.float32
    )
    return mixed


def _merged(blocks: Iterator[tuple[int, Block]]) -> Iterator[tuple[int, Block]]:
    """Join small blocks: resampling each alone takes time."""
    waiting: list[Block] = []
    last, count = (0, 0), 0
    for rate, block in blocks:
        if waiting and ((rate, block.shape[1]) != last or count >= _BLOCK):
            yield last[0], np.concatenate(waiting)
            waiting, count = [], 0
        waiting.append(block)
        last, count = (rate, block.shape[1]), count + len(block)
    if waiting:
        yield last[0], np.concatenate(waiting)


def _read_by_libsndfile(data: bytes | bytearray, kind: str) -> Iterator[tuple[int, Block]]:
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise _missing(kind, error) from None

    class Stream(soundfile.SoundFile):  # type: ignore[misc]  # has no types
        def seekable(self) -> bool:
            return False  # else each read ends with a seek, after which MP3 has a gap

    is_any = False
    try:
        with Stream(io.BytesIO(data)) as file:
            while len(block := file.read(_READ, dtype="float32", always_2d=True)):
                yield file.samplerate, to_finite(block)
                is_any = True
    except soundfile.LibsndfileError as error:
        if not is_any:
            raise _damaged(kind, error.error_string) from None


def _read_by_ffmpeg(data: bytes | bytearray, kind: str) -> Iterator[tuple[int, Block]]:
    try:
        import av
    except ImportError as error:
        raise _missing(kind, error) from None
    demuxer = _DEMUXERS[kind]
    options = {
        "codec_whitelist": _CODECS,
        "format_whitelist": demuxer,
        "protocol_whitelist": "none",
    }
    try:
        with av.open(
            io.BytesIO(data), "r", format=demuxer, options=options, metadata_errors="replace"
        ) as container:
            stream = next(iter(container.streams.audio), None)
            if stream is None:
                raise SoundError(f"is a file ({kind}) without sound: none of its streams is audio")
            if stream.codec_context.name not in _CODECS.split(","):
                raise SoundError(
                    f"is a file ({kind}) whose codec, {stream.codec_context.name}, is not supported"
                )
            stream.codec_context.thread_count = 1
            for packet in container.demux(stream):
                yield from _decoded(packet)
    except av.FFmpegError as error:
        raise _damaged(kind, str(error.strerror)) from None


def _decoded(packet: Any) -> Iterator[tuple[int, Block]]:
    """Yield the blocks of a packet, none if it is damaged."""
    import av

    try:
        frames = packet.decode()
    except av.error.InvalidDataError:
        return
    for frame in frames:
        found = frame.to_ndarray()
        channels = frame.layout.nb_channels
        found = found.T if frame.format.is_planar else found.reshape(-1, channels)
        yield frame.sample_rate, _as_floats(found)


def _as_floats(samples: npt.NDArray[Any]) -> Block:
    full = _INTEGERS.get(samples.dtype.name)
    if full is None:
        return to_finite(samples)
    offset = full if samples.dtype == np.uint8 else 0
    return (samples.astype(np.float32) - np.float32(offset)) * np.float32(1 / full)


def _missing(kind: str, error: Exception) -> SoundError:
    return SoundError(
        f"is a file ({kind}) that this server cannot read: it lacks the extra `audio` ({error}). "
        "WAV files always work; the operator can run pip install '.[audio]' in tk's checkout"
    )


def _damaged(kind: str, problem: str) -> SoundError:
    return SoundError(f"is a file ({kind}) that is truncated or damaged: {problem}")
