"""The demo's screens at a fixed moment, as text.

`python -m tests.top.screens` writes them again. Look at the difference before you commit it.
"""

from __future__ import annotations

import asyncio
import pickle
from functools import cache
from pathlib import Path

from toolkit.top.app import TopApp
from toolkit.top.readings.demo import demo_sources
from toolkit.top.run import add_demo_history
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
"""Names of screens, and the keys that lead to them."""
SIZES = ((80, 24), (200, 60))


def moment():
    return MOMENT


@cache
def pickled_demo():
    """Return the demo's servers with their history, which takes a while to simulate."""
    state = State(demo_sources(moment), interval=1.0, window=30.0)
    add_demo_history(state, 1.0)
    return pickle.dumps(state)


def demo_state():
    """Return a copy of the demo's servers with their history."""
    return pickle.loads(pickled_demo())


def demo_app(**settings):
    """Return the dashboard of the demo, with a stopped clock. `settings` are those of TopApp."""
    return TopApp(demo_state(), **settings)


def screen_text(app):
    """Return the screen as lines of text."""
    # Private: the public way renders an SVG, which is slow.
    strips = app.screen._compositor.render_strips()
    return "".join(f"{strip.text.rstrip()}\n" for strip in strips)


async def screen(keys, size, expected=None, **settings):
    """Return the screen after `keys`, once it is `expected`, which may take 5 s, else after 1 s."""
    app = demo_app(**settings)
    async with app.run_test(size=size) as pilot:
        await pilot.pause(0.02)
        for key in keys:
            await pilot.press(key)
            await pilot.pause(0.02)
        for _ in range(100 if expected is not None else 20):
            if screen_text(app) == expected:
                break
            await pilot.pause(0.05)
        return screen_text(app)


def file_of(name, size):
    return FOLDER / f"{name}-{size[0]}x{size[1]}.txt"


async def write():
    FOLDER.mkdir(exist_ok=True)
    for name, keys in SCREENS.items():
        for size in SIZES:
            file_of(name, size).write_text(await screen(keys, size))


if __name__ == "__main__":
    asyncio.run(write())
