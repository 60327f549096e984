"""The front end in one process, without an engine."""

from __future__ import annotations

import asyncio
import gc
import types

import pytest

from toolkit.config import EngineConfig, ModelConfig, ServerConfig
from toolkit.errors import ConfigError
from toolkit.serving import front, lifecycle


def test_objects_of_start_up_are_exempt_from_collection(monkeypatch):
    """A full collection of them takes 0.1 s, in which no stream gets a token."""

    async def nothing(*_: object) -> None:
        pass

    setup = front.ModelSetup(EngineConfig(model=ModelConfig(model="m")), ("m",))
    one = front.SingleProcess([setup], ServerConfig())
    cores = types.SimpleNamespace(infos=[])
    engine = types.SimpleNamespace(
        start=nothing,
        tokenizer=None,
        cores=cores,
        default_sampling={},
        inputs=types.SimpleNamespace(transcribes=False),
        died=asyncio.Event(),
    )
    monkeypatch.setattr(one, "_engines", [engine])
    http = types.SimpleNamespace(start=nothing)
    monkeypatch.setattr(front, "make_server", lambda *_: http)
    gc.unfreeze()
    try:
        asyncio.run(one.start(None, None))
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


async def test_an_idle_server_ends_and_cuts_no_request():
    """The idle time is over while a request runs, and one more comes just before the end."""
    states: list[str] = []

    class Front:
        failed, failure, num_active = asyncio.Event(), None, 0
        idle_seconds = 0.0
        has_request = True

        async def drain(self) -> None:
            states.append("drained" if not self.has_request else "waiting")
            while self.has_request:
                await asyncio.sleep(0.01)

        async def shut_down(self, reason: str) -> None:
            states.append("cut" if self.has_request else "ended")

    one = Front()
    signals = types.SimpleNamespace(received=asyncio.Event(), received_again=asyncio.Event())
    config = ServerConfig(idle_timeout=0.1, shutdown_timeout=0.0)
    serving = asyncio.create_task(
        lifecycle.serve_until_stopped(one, config, signals, states.append)
    )
    await asyncio.sleep(0.3)
    assert states == []
    one.idle_seconds = 0.1
    await asyncio.sleep(0.2)
    assert states == ["stopping", "waiting"]
    one.has_request = False
    await serving
    assert states == ["stopping", "waiting", "ended"]


def test_idle_timeout_is_of_one_api_worker():
    with pytest.raises(ConfigError, match="--idle-timeout needs --api-workers 1"):
        ServerConfig(idle_timeout=5.0, api_workers=2)
