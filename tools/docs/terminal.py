"""Draw terminals as SVG: a recorded run, and `tk top` with invented servers at a fixed moment.

To record a chat again, have it in tmux, 88 columns wide, and save what `tmux capture-pane -e -p`
prints to `recordings/chat.ansi`."""

from __future__ import annotations

import asyncio
import io
import re
from pathlib import Path

TOP = "tk top --demo"
RECORDINGS = Path(__file__).parent / "recordings"
FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>{title}</title>
<style>
.{unique_id}-matrix {{
font: {char_height}px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
line-height: {line_height}px; font-variant-east-asian: full-width; white-space: pre
}}
.{unique_id}-title {{ font: 18px system-ui, sans-serif }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""Rich's format without its font, which it would fetch from another host."""


def terminal_pictures() -> dict[str, str]:
    """Return the text of each picture, by its name."""
    return {
        "chat.svg": recorded("chat", "tk chat", 88),
        "top.svg": asyncio.run(_top()),
    }


def recorded(name: str, title: str, columns: int) -> str:
    """Return the SVG of a recording."""
    from rich.console import Console
    from rich.terminal_theme import MONOKAI
    from rich.text import Text

    text = Text.from_ansi((RECORDINGS / f"{name}.ansi").read_text())
    console = Console(
        record=True, width=columns, file=io.StringIO(), color_system="truecolor",
        force_terminal=True, legacy_windows=False,
    )  # fmt: skip
    console.print(text, no_wrap=True, overflow="ignore", crop=False)
    return _stripped(
        console.export_svg(
            title=title, theme=MONOKAI, code_format=FORMAT.replace("{title}", title), unique_id=name
        )
    )


async def _top() -> str:
    """Return the SVG of the first screen of `tk top`."""
    from toolkit.top.app import TopApp
    from toolkit.top.readings.demo import demo_sources
    from toolkit.top.run import add_demo_history
    from toolkit.top.state import State

    state = State(demo_sources(lambda: 1000.0), interval=1.0, window=30.0)
    add_demo_history(state, 1.0)
    app = TopApp(state)
    async with app.run_test(size=(100, 30)) as pilot:
        drawn, seen = app.export_screenshot(title=TOP), 0
        while seen < 3:  # until nothing changes
            await pilot.pause(0.1)
            last, drawn = drawn, app.export_screenshot(title=TOP)
            seen = seen + 1 if drawn == last else 0
    drawn = re.sub(r"<!--.*?-->", "", drawn)
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"terminal-\d+", "top", drawn)
    fonts = 'ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace'
    drawn = re.sub(r"font-family: (Fira Code, monospace|arial)", f"font-family: {fonts}", drawn)
    return _stripped(drawn)


def _stripped(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines() if line.strip())
