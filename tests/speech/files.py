"""Sound files for the tests, made by libsndfile and FFmpeg."""

from __future__ import annotations

import io

import av
import numpy as np
import numpy.typing as npt
import soundfile

FULL = 2**15


def tone(seconds: float, rate: int, frequency: float = 440.0) -> npt.NDArray[np.float64]:
    """Return samples of a sine of half the full scale."""
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)


def written(
    samples: npt.NDArray[np.float64], rate: int, kind: str = "WAV", subtype: str = "PCM_16"
) -> bytes:
    """Return a file that libsndfile writes. samples: [n] or [n, channels]."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def encoded(
    container: str, codec: str, *, seconds: float = 1.0, rate: int = 48_000, video: bool = False
) -> bytes:
    """Return a file that FFmpeg writes: a stereo tone, perhaps after a stream of video."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        output.metadata["title"] = "Ü"
        sound = output.add_stream(codec, rate=rate, layout="stereo") if codec else None
        if video:
            picture = output.add_stream("mpeg4", rate=25, width=64, height=64, pix_fmt="yuv420p")
            frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
            frame.pts = 0
            output.mux([*picture.encode(frame), *picture.encode(None)])
        if sound is not None:
            context = sound.codec_context
            converter = av.AudioResampler(context.format.name, "stereo", rate, context.frame_size)
            samples = np.stack([tone(seconds, rate)] * 2).astype(np.float32)
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
            frame.sample_rate, frame.pts = rate, 0
            for part in [*converter.resample(frame), *converter.resample(None), None]:
                output.mux(sound.encode(part))
    return file.getvalue()
