"""The application with a model that hears, without an engine and a network."""

from __future__ import annotations

import io
import threading
import time
import wave
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import uvicorn

from tests.speech.invented import BYTES, HEARING, Delta, FakeModel
from toolkit.api.app import make_app
from toolkit.api.http.server import ServedModel, Server
from toolkit.config import ServerConfig
from toolkit.metrics import Metrics
from toolkit.speech.clip import SAMPLE_RATE
from toolkit.speech.pool import SoundLimits, SoundPool
from toolkit.speech.tokens import HearingInfo


class Tokens:
    """A tokenizer of bytes."""

    def __init__(self) -> None:
        self.token_names = {token: chr(token) for token in BYTES}
        self.byte_lists = {token: list(found) for token, found in BYTES.items()}

    def byte_table(self, skip_special_tokens: bool) -> dict[int, bytes]:
        return BYTES

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(text.encode())


class Stream:
    """Stands in for a RequestStream."""

    def __init__(self, deltas: AsyncGenerator[Delta, None]) -> None:
        self._deltas = deltas

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas

    def close(self) -> None:
        self.is_closed = True


class Engine:
    """Stands in for an AsyncLLM."""

    num_waiting = num_waiting_tokens = 0
    max_num_running = 256

    def __init__(self, model: FakeModel, hearing: HearingInfo | None = HEARING) -> None:
        self.model = model
        self.info = SimpleNamespace(
            hearing=hearing,
            device="cuda:0",
            max_model_len=448,
            sight=None,
            sound=None,
            generates=True,
            tasks=["generate"],
        )
        self.tokenizer = SimpleNamespace(has_chat_template=False)
        self.inputs = SimpleNamespace(
            require_tokenizer=Tokens, transcribes=hearing is not None, transcript_marker=None
        )
        self.metrics = Metrics("tk", "tiny")
        self.stats = SimpleNamespace(num_running=0)
        self.config: Any = SimpleNamespace(model=SimpleNamespace(model="tiny"))
        self.adapters = SimpleNamespace(
            find=lambda name: None,
            explain_missing=lambda name: None,
            describe_names=lambda *names: ", ".join(names),
            folders={},
        )
        self.streams: list[Stream] = []
        self.ids: list[str] = []

    async def submit(
        self, prompt: Any, params: Any, *, request_id: str, adapter: object = None
    ) -> Stream:
        self.ids.append(request_id)
        clip = prompt["multi_modal_data"]["audio"]
        self.streams.append(Stream(self.model(prompt["prompt_token_ids"], clip, params)))
        return self.streams[-1]


class Served:
    """The application, and clients of it. Close it with `close`."""

    def __init__(
        self,
        model: FakeModel,
        hearing: HearingInfo | None = HEARING,
        name: str = "tiny",
        **config: Any,
    ) -> None:
        self.engine: Any = Engine(model, hearing)
        self.pool = SoundPool(SoundLimits(max_seconds=600))
        self.pool.start()
        settings = ServerConfig(**config)
        models = [ServedModel(self.engine, (name,))]
        self.app = make_app(Server(settings, models, sound=self.pool))

    def http(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, client=("127.0.0.1", 1))
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")

    def client(self) -> openai.AsyncOpenAI:
        """Return the official client."""
        return openai.AsyncOpenAI(
            base_url="http://127.0.0.1:8000/v1", api_key="none", http_client=self.http()
        )

    def close(self) -> None:
        self.pool.close()


@contextmanager
def serving(served: Served) -> Iterator[str]:
    """Serve the application on a free port. Yields its address."""
    config = uvicorn.Config(served.app, port=0, lifespan="off", log_config=None, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def wav(seconds: float, number: int = 0, rate: int = SAMPLE_RATE) -> bytes:
    """Return a WAV file whose samples are `number`."""
    samples = np.full(round(seconds * rate), number, "<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, rate, 0, "NONE", ""))
        writer.writeframes(samples.tobytes())
    return file.getvalue()
