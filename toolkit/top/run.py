"""`tk top`: the dashboard, or one snapshot without a terminal."""

import asyncio
import os
import sys
from collections.abc import Sequence

from toolkit.client.choice import choose_urls
from toolkit.client.trust import Trust
from toolkit.config.clients import DEFAULT_URL, TopConfig
from toolkit.errors import ToolkitError
from toolkit.top.plain import as_json, snapshot
from toolkit.top.readings.recording import RecordedSource, RecordingWriter, recorded_sources
from toolkit.top.readings.source import HTTPSource, Source
from toolkit.top.state import State


def run(config: TopConfig) -> int:
    """Run the command; return its exit code."""
    sources = open_sources(config)
    state = State(sources, interval=config.interval, window=config.window)
    recorder = (
        RecordingWriter(config.record, [source.url for source in sources])
        if config.record
        else None
    )
    if config.once or config.json or not has_screen():
        asyncio.run(take_readings(state, recorder))
        print(as_json(state) if config.json else snapshot(state))
        return 0
    from toolkit.top.app import TopApp
    from toolkit.top.background import is_light

    theme = config.theme if config.theme != "auto" else "light" if is_light() else "dark"
    add_demo_history(state, config.interval)
    app = TopApp(state, theme=theme, recorder=recorder)
    app.run()
    if app.failure is not None:
        raise app.failure
    return app.return_code or 0


def open_sources(config: TopConfig) -> Sequence[Source]:
    """Return the sources of a recording, of the demo or of servers."""
    if config.replay is not None:
        return recorded_sources(config.replay)
    if config.demo:
        from toolkit.top.readings.demo import demo_sources

        return demo_sources()
    urls = config.url or choose_urls() or (DEFAULT_URL,)
    trust = Trust(config.cacert, config.insecure)
    return [HTTPSource(url, config.api_key, config.admin_key, trust=trust) for url in urls]


def has_screen() -> bool:
    """Return True on a terminal that can move its cursor. Textual draws on stderr."""
    ends = (sys.stdin, sys.stdout, sys.stderr)
    return all(end.isatty() for end in ends) and os.environ.get("TERM", "dumb") != "dumb"


def add_demo_history(state: State, interval: float) -> None:
    """Add past readings of demo servers, so that the charts are full from the start."""
    from toolkit.top.readings.demo import DemoSource

    for source, server in zip(state.sources, state.servers, strict=True):
        if isinstance(source, DemoSource):
            for reading in source.past(interval):
                server.add(reading)


async def take_readings(state: State, recorder: RecordingWriter | None) -> None:
    """Read each server twice, an interval apart, or a recording to its end.

    Raises ToolkitError if no server answers."""
    try:
        await asyncio.gather(
            *(_read_server(state, index, recorder) for index in range(len(state.servers)))
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


async def _read_server(state: State, index: int, recorder: RecordingWriter | None) -> None:
    source, server = state.sources[index], state.servers[index]
    if isinstance(source, RecordedSource):
        while (reading := await source.read(requests=True)) is not None:
            server.add(reading)
        return
    for attempt in range(2):
        await asyncio.sleep(state.interval if attempt else 0.0)
        reading = await source.read(requests=True)
        if reading is None:
            return
        server.add(reading)
        if recorder is not None:
            recorder.add(reading)
        if reading.error:
            return
