"""The engine's process dies while a long file is transcribed, and no text is lost."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests import hearing
from tests.server import WAIT, Server, until
from tests.speech.files import FULL, written

NUM_WINDOWS = 12
PROBABILITIES = ("avg_logprob", "no_speech_prob")
FIELDS: list[dict[str, Any]] = [
    {"response_format": "text"},
    {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = hearing.save(tmp_path_factory.mktemp("models") / "whisper", **hearing.SUPPRESSED)
    flags = ("--dtype", "float32", "--device", "cpu", "--max-num-seqs", "5")
    running = Server(str(folder), *flags, cwd=folder)
    yield running
    running.stop()


def test_the_ready_card_of_a_model_that_hears_has_no_chat(server: Server) -> None:
    assert re.search(r"sound +[\d.]+ s at once; \d+ languages", server.stderr)
    assert "in a browser" not in server.stderr
    assert "Try:\ntk transcribe speech.wav\ncurl " in server.stderr


class Upload:
    """A file that a client has transcribed. Its answer comes as events."""

    def __init__(self, server: Server, file: bytes, fields: dict[str, Any]) -> None:
        self.events: list[dict[str, Any]] = []
        form = fields | {"stream": "true", "max_completion_tokens": "20", "language": "en"}
        self._thread = threading.Thread(target=self._read, args=(server, file, form), daemon=True)
        self._thread.start()

    @property
    def done(self) -> dict[str, Any]:
        """The last event: the transcript, without probabilities, whose last digits vary."""
        self._thread.join(WAIT)
        done = self.events[-1]
        for segment in done.get("segments", ()):
            for name in PROBABILITIES:
                segment.pop(name, None)
        return done

    def _read(self, server: Server, file: bytes, form: dict[str, Any]) -> None:
        url, files = "/v1/audio/transcriptions", {"file": ("a.wav", file)}
        with server.http.stream("POST", url, data=form, files=files) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.events.append(json.loads(line.removeprefix("data: ")))


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_transcripts_survive_the_death_of_the_engine(server: Server, fields):
    clips = [hearing.sound(40 + seed) for seed in range(NUM_WINDOWS)]
    file = written(np.rint(np.concatenate(clips) * FULL) / FULL, hearing.RATE)
    expected = Upload(server, file, fields).done
    assert expected["type"] == "transcript.text.done"
    num_kills = server.stderr.count("SIGKILL")
    with server.slowly():
        upload = Upload(server, file, fields)
        until(lambda: len(upload.events) >= 3)
        server.cores[0].kill()
        until(lambda: server.stderr.count("SIGKILL") > num_kills)
        num_before = len(upload.events)
    assert upload.done == expected
    assert len(upload.events) > num_before + 3, "it died at the end"
    deltas = "".join(one.get("delta", "") for one in upload.events)
    assert deltas == expected["text"]
    assert "Traceback" not in server.stderr
    until(server.is_idle)
