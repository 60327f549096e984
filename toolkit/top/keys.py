"""The keys: what they do, and how help tells it."""

from __future__ import annotations

from textual.binding import Binding, BindingType

FAR = 1_000_000_000
"""More rows than any table has."""

BINDINGS: list[BindingType] = [
    Binding("q", "quit", "Quit"),
    Binding("question_mark", "help", "Help"),
    *(Binding(str(number), f"page({number})") for number in range(1, 6)),
    Binding("p,space", "pause", "Pause"),
    Binding("plus,equals_sign", "interval(1)", "Look less often"),
    Binding("minus", "interval(-1)", "Look more often"),
    Binding("slash", "filter", "Filter"),
    Binding("s", "sort", "Sort"),
    Binding("r", "reverse", "Reverse"),
    Binding("enter", "open", "Open"),
    Binding("escape", "leave", "Back"),
    Binding("x,delete", "abort", "End request"),
    Binding("j,down", "move(1)", "Down"),
    Binding("k,up", "move(-1)", "Up"),
    Binding("pagedown,ctrl+d", "move_page(1)", "Page down"),
    Binding("pageup,ctrl+u", "move_page(-1)", "Page up"),
    Binding("g,home", f"move(-{FAR})", "First"),
    Binding("G,end", f"move({FAR})", "Last"),
    Binding("l,right", "turn(1)", "Next"),
    Binding("h,left", "turn(-1)", "Before"),
    Binding("tab", "next_page(1)", "Next page", priority=True),
    Binding("shift+tab", "next_page(-1)", "Page before", priority=True),
    Binding("t", "theme", "Light or dark"),
    Binding("ctrl+c", "quit", show=False, priority=True),
]
"""Of the screen; dialogs have their own."""

HELP = (
    ("1 2 3 4 5", "Overview, requests, latency, servers, config"),
    ("Tab", "The next page"),
    ("j k ↓ ↑", "Down and up; PgDn, PgUp, g and G for more"),
    ("Enter", "A request in full; a server alone"),
    ("Esc", "Back: out of the filter, to all servers"),
    ("/", "Show only rows that contain ..."),
    ("s r", "Sort by the next column; the other way round"),
    ("x", "End the request under the cursor"),
    ("h l", "Another latency first"),
    ("p", "Pause, and go on"),
    ("+ -", "Look less often, more often"),
    ("t", "Light or dark"),
    ("Ctrl-P", "All of this by name"),
    ("q", "Quit"),
)
"""Keys, and what they do."""
