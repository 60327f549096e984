"""The front end in one process, without an engine."""

from __future__ import annotations

import asyncio
import gc
import types

from toolkit.config import EngineConfig, ModelConfig, ServerConfig
from toolkit.serving import front


def test_objects_of_start_up_are_exempt_from_collection(monkeypatch):
    """A full collection of them takes 0.1 s, in which no stream gets a token."""

    async def nothing(*_: object) -> None:
        pass

    setup = front.ModelSetup(EngineConfig(model=ModelConfig(model="m")), ("m",))
    one = front.SingleProcess([setup], ServerConfig())
    cores = types.SimpleNamespace(infos=[])
    engine = types.SimpleNamespace(
        start=nothing, tokenizer=None, cores=cores, default_sampling={}, died=asyncio.Event()
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
