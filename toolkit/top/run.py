"""`tk top`: the screen, or one snapshot where there is no screen."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from toolkit.config.clients import TopConfig
from toolkit.errors import ToolkitError
from toolkit.top.plain import as_json, snapshot
from toolkit.top.readings.recording import Recorder, Replay, replays
from toolkit.top.readings.source import HTTPSource, Source
from toolkit.top.state import State


def run(config: TopConfig) -> int:
    """Shows until the user quits; the exit code of the command."""
    sources = sources_of(config)
    state = State(sources, interval=config.interval, window=config.window)
    recorder = (
        Recorder(config.record, [source.url for source in sources]) if config.record else None
    )
    if config.once or config.json or not has_screen():
        asyncio.run(look(state, recorder))
        print(as_json(state) if config.json else snapshot(state))
        return 0
    from toolkit.top.app import TopApp
    from toolkit.top.background import is_light

    theme = config.theme if config.theme != "auto" else "light" if is_light() else "dark"
    show_past(state, config.interval)
    app = TopApp(state, theme=theme, recorder=recorder)
    app.run()
    if app.failure is not None:
        raise app.failure
    return app.return_code or 0


def sources_of(config: TopConfig) -> Sequence[Source]:
    """The servers that are meant."""
    if config.replay is not None:
        return replays(config.replay)
    if config.demo:
        from toolkit.top.readings.demo import demo_sources

        return demo_sources()
    return [HTTPSource(url, config.api_key, config.admin_key) for url in config.url]


def has_screen() -> bool:
    """Whether a dashboard can be drawn, by a terminal that moves its cursor. Textual draws on stderr."""
    ends = (sys.stdin, sys.stdout, sys.stderr)
    return all(end.isatty() for end in ends) and os.environ.get("TERM", "dumb") != "dumb"


def show_past(state: State, interval: float) -> None:
    """Made-up servers have one, so that the charts are full at once."""
    from toolkit.top.readings.demo import DemoSource

    for source, server in zip(state.sources, state.servers, strict=True):
        if isinstance(source, DemoSource):
            for reading in source.past(interval):
                server.add(reading)


async def look(state: State, recorder: Recorder | None) -> None:
    """Two readings of each server, an interval apart; of a recording, all.

    Raises ToolkitError when no server answers.
    """
    try:
        await asyncio.gather(
            *(_look_at(state, index, recorder) for index in range(len(state.servers)))
        )
    finally:
        for source in state.sources:
            await source.close()
        if recorder is not None:
            recorder.close()
    state.refresh()
    if not any(server.last for server in state.servers):
        raise ToolkitError(
            " ".join(server.error for server in state.servers) or "The recording is empty."
        )


async def _look_at(state: State, index: int, recorder: Recorder | None) -> None:
    source, server = state.sources[index], state.servers[index]
    if isinstance(source, Replay):
        while (reading := await source.read(requests=True)) is not None:
            server.add(reading)
        return
    for look in range(2):
        await asyncio.sleep(state.interval if look else 0.0)
        reading = await source.read(requests=True)
        if reading is None:
            return
        server.add(reading)
        if recorder is not None:
            recorder.add(reading)
        if reading.error:
            return
