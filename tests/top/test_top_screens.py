"""Pages and dialogs equal the committed screens and fit terminals of any size."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest
from rich.cells import cell_len

from tests.top.screens import MOMENT, SCREENS, SIZES, demo_app, demo_state, file_of, screen
from toolkit.top.drawing import chrome
from toolkit.top.drawing.paint import width_of
from toolkit.top.drawing.palette import DARK, LIGHT, Palette
from toolkit.top.readings.demo import demo_sources
from toolkit.top.state import State


@pytest.mark.parametrize(("name", "size"), [*product(SCREENS, SIZES)])
async def test_screen_equals_the_committed_one(name, size):
    """After an intended change: `python -m tests.top.screens`, look at `git diff`, commit."""
    expected = file_of(name, size).read_text()
    assert await screen(SCREENS[name], size, expected) == expected


@pytest.mark.parametrize("servers", ["all", "one", "none answers"])
@pytest.mark.parametrize("number", range(5))
def test_pages_fit_any_terminal(number, servers):
    app = demo_app()
    state, page = app.state, app.pages[number]
    if servers == "none answers":
        state = State(demo_sources(lambda: MOMENT), interval=1.0, window=30.0)
    elif servers == "one":
        state.focus = state.servers[0]
    state.refresh()
    page.show(state)
    for width, height in product((20, 38, 78, 100, 198, 300), (5, 12, 19, 36, 55)):
        lines = page.draw(state, width, height)
        assert len(lines) <= max(height, 19), (width, height)
        if width >= 78:
            assert max(width_of(line) for line in lines) <= width, (width, height)
    for width in (20, 80, 200):
        assert width_of(chrome.title_line(state, width)) <= max(width, 60)
        assert width_of(chrome.key_line(page, state, width)) <= width
        assert all(width_of(line) <= width for line in chrome.bottleneck_lines(state, width, 2))


@pytest.mark.parametrize("colors", [DARK, LIGHT, None])
def test_every_style_in_use_exists(colors):
    palette = Palette(colors)
    app = demo_app()
    state = app.state
    for server, source in zip(state.servers, state.sources, strict=True):
        server.add(asyncio.run(source.read(requests=True)))
    state.has_colors = colors is not None
    state.refresh()
    drawn = [
        chrome.title_line(state, 80),
        chrome.tab_line(app.pages, app.page, 80),
        *chrome.bottleneck_lines(state, 80, 2),
    ]
    for page in app.pages:
        page.show(state)
        drawn += [chrome.key_line(page, state, 80), *page.draw(state, 198, 55)]
    styles = {palette.style(style) for line in drawn for _, style in line}
    if colors is None:
        assert not any(style.color or style.bgcolor for style in styles)
    else:
        assert len({style.color for style in styles}) > 20


async def test_no_color_removes_all_colors(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    app = demo_app()
    async with app.run_test(size=(80, 24)) as pilot:
        for number in "12345":
            await pilot.press(number)
            await pilot.pause(0.1)
            body = app.query_one("#body")
            segments = [
                segment for strip in body.render_lines(body.size.region) for segment in strip
            ]
            colors = [
                c
                for one in segments
                if one.style
                for c in (one.style.color, one.style.bgcolor)
                if c
            ]
            assert all(color.is_default for color in colors)
            if number == "3":
                assert "▓" in "".join(segment.text for segment in segments)  # instead of colors


def test_committed_screens_have_their_size():
    for name, size in product(SCREENS, SIZES):
        lines = file_of(name, size).read_text().splitlines()
        assert len(lines) == size[1], name
        assert max(map(cell_len, lines)) <= size[0], name


def test_demo_has_a_history():
    assert all(len(server.points["generation"]) > 100 for server in demo_state().servers)
