"""Every page and dialog as it was last looked at, and nothing sticks out at any size."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest
from rich.cells import cell_len

from tests.top.screens import MOMENT, SCREENS, SIZES, demo_app, file_of, screen
from toolkit.top.drawing import chrome
from toolkit.top.drawing.paint import width_of
from toolkit.top.drawing.palette import DARK, LIGHT, Palette
from toolkit.top.readings.demo import demo_sources
from toolkit.top.run import show_past
from toolkit.top.state import State


@pytest.mark.parametrize(("name", "size"), [*product(SCREENS, SIZES)])
async def test_a_screen_is_as_it_was_last_looked_at(name, size):
    """When this fails on purpose: `python -m tests.top.screens`, look at what `git diff` shows, and commit it."""
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
        assert width_of(chrome.title(state, width)) <= max(width, 60)
        assert width_of(chrome.keys(page, state, width)) <= width
        assert all(width_of(line) <= width for line in chrome.why(state, width, 2))


@pytest.mark.parametrize("colors", [DARK, LIGHT, None])
def test_every_style_that_is_drawn_exists(colors):
    palette = Palette(colors)
    app = demo_app()
    state = app.state
    for server, source in zip(state.servers, state.sources, strict=True):
        server.add(asyncio.run(source.read(requests=True)))
    state.colors = colors is not None
    state.refresh()
    drawn = [
        chrome.title(state, 80),
        chrome.tabs(app.pages, app.page, 80),
        *chrome.why(state, 80, 2),
    ]
    for page in app.pages:
        page.show(state)
        drawn += [chrome.keys(page, state, 80), *page.draw(state, 198, 55)]
    styles = {palette.style(style) for line in drawn for _, style in line}
    if colors is None:
        assert not any(style.color or style.bgcolor for style in styles)
    else:
        assert len({style.color for style in styles}) > 20


async def test_no_color_is_sent_when_none_is_wanted(monkeypatch):
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
                assert "▓" in "".join(segment.text for segment in segments)  # shades instead


def test_all_screens_have_the_width_they_are_for():
    for name, size in product(SCREENS, SIZES):
        lines = file_of(name, size).read_text().splitlines()
        assert len(lines) == size[1], name
        assert max(map(cell_len, lines)) <= size[0], name


def test_the_demo_has_a_past():
    state = State(demo_sources(lambda: MOMENT), interval=1.0, window=30.0)
    show_past(state, 1.0)
    assert all(len(server.points["generation"]) > 100 for server in state.servers)
