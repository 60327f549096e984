"""The demo's screens at a fixed moment, as text. `python -m tests.top.screens` writes them anew, to be looked at and committed."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from functools import cache
from pathlib import Path

from toolkit.top.app import TopApp
from toolkit.top.readings.demo import demo_sources
from toolkit.top.run import show_past
from toolkit.top.state import State

FOLDER = Path(__file__).parent / "screens"
MOMENT = 1000.0

SCREENS = {
    "overview": (),
    "one-server": ("4", "j", "enter"),
    "requests": ("2", "j", "j"),
    "request": ("2", "j", "enter"),
    "latency": ("3",),
    "servers": ("4", "j"),
    "config": ("5", "j"),
    "help": ("question_mark",),
    "abort": ("2", "x"),
}
"""What to press to get there."""
SIZES = ((80, 24), (200, 60))


@cache
def the_demo():
    """The demo's servers with their past, which takes a while to make up."""
    state = State(demo_sources(lambda: MOMENT), interval=1.0, window=30.0)
    show_past(state, 1.0)
    return state


def demo_app(**settings):
    """The dashboard over the demo, whose clock stands still; `settings` are those of TopApp."""
    return TopApp(deepcopy(the_demo()), **settings)


def shown(app):
    """The screen as lines of text."""
    strips = (
        app.screen._compositor.render_strips()
    )  # what goes to the terminal; the public way is a picture, and slow
    return "".join(f"{strip.text.rstrip()}\n" for strip in strips)


async def screen(keys, size, expected=None, **settings):
    """What is shown once `keys` have been pressed; a machine that is slow to show what is `expected` gets some time."""
    app = demo_app(**settings)
    async with app.run_test(size=size) as pilot:
        await pilot.pause(0.1)
        for key in keys:
            await pilot.press(key)
            await pilot.pause(0.1)
        for _ in range(100 * (expected is not None)):
            if shown(app) == expected:
                break
            await pilot.pause(0.05)
        return shown(app)


def file_of(name, size):
    return FOLDER / f"{name}-{size[0]}x{size[1]}.txt"


async def write():
    """All of them."""
    FOLDER.mkdir(exist_ok=True)
    for name, keys in SCREENS.items():
        for size in SIZES:
            file_of(name, size).write_text(await screen(keys, size))


if __name__ == "__main__":
    asyncio.run(write())
