"""Key bindings and their help."""

from textual.binding import Binding, BindingType

FAR = 1_000_000_000  # more rows than any table has

BINDINGS: list[BindingType] = [
    Binding("q", "quit", "Quit"),
    Binding("question_mark", "help", "Help"),
    *(Binding(str(number), f"page({number})") for number in range(1, 6)),
    Binding("p,space", "pause", "Pause"),
    Binding("plus,equals_sign", "interval(1)", "Longer interval"),
    Binding("minus", "interval(-1)", "Shorter interval"),
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
    Binding("h,left", "turn(-1)", "Previous"),
    Binding("tab", "next_page(1)", "Next page", priority=True),
    Binding("shift+tab", "next_page(-1)", "Previous page", priority=True),
    Binding("t", "theme", "Light or dark"),
    Binding("ctrl+c", "quit", show=False, priority=True),
]  # bindings of the screen; dialogs have their own

HELP = (
    ("1 2 3 4 5", "Overview, requests, latency, servers, config"),
    ("Tab", "Next page"),
    ("j k ↓ ↑", "Down, up; PgDn, PgUp; g first, G last"),
    ("Enter", "Open a request; focus on a server"),
    ("Esc", "Back: clear the filter, show all servers"),
    ("/", "Filter the rows"),
    ("s r", "Sort by the next column; reverse the order"),
    ("x", "End the request under the cursor"),
    ("h l", "Previous or next latency first"),
    ("p", "Pause or resume"),
    ("+ -", "Longer or shorter interval"),
    ("t", "Light or dark theme"),
    ("Ctrl-P", "All commands by name"),
    ("q", "Quit"),
)
