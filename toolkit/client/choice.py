"""Choice of a running server for a client without --url."""

import sys
from collections.abc import Sequence

from toolkit.errors import ConfigError
from toolkit.logs import escape_line
from toolkit.running import RunningServer, as_list, running_servers


def ready_servers() -> list[RunningServer]:
    """Return the user's servers on this machine that clients can connect to."""
    return [one for one in running_servers() if one.state == "ready" and one.uds is None]


def starting_server(model: str | None) -> RunningServer | None:
    """Return a server that starts and will have the model, without a model any; None: none."""
    found = (one for one in running_servers() if one.state == "starting" and one.uds is None)
    return next((one for one in found if model is None or one.has(model)), None)


def choose_server(model: str | None = None) -> RunningServer | None:
    """Return the only running server, or of several the one that the user chooses.

    None if none runs. With `model`, servers that have it come before all others. Raises ConfigError
    for several, if there is no terminal to ask at."""
    servers = ready_servers()
    matching = [one for one in servers if model is not None and one.has(model)]
    found = matching or servers
    return found[0] if len(found) == 1 else _ask(found) if found else None


def choose_urls() -> tuple[str, ...]:
    """Return the addresses of the running servers that the user chooses: one or all."""
    servers = ready_servers()
    if len(servers) < 2:
        return tuple(one.url for one in servers)
    chosen = _ask(servers, may_be_all=True)
    return tuple(one.url for one in servers if chosen in (None, one))


def _ask(servers: Sequence[RunningServer], *, may_be_all: bool = False) -> RunningServer | None:
    """Return the server that the user chooses at the terminal; None for all.

    Raises ConfigError without a terminal, and at the end of its input."""
    several = f"{len(servers)} servers run: {as_list(servers)}. Choose with --url, such as --url "
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"{several}{servers[0].url}", param="url")
    for number, server in enumerate(servers, 1):
        print(escape_line(f"{number}  {server.title}"), file=sys.stderr)
    hint = ", Enter for all" if may_be_all else ""
    while True:
        print(f"Which server? [1-{len(servers)}{hint}] ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            print(file=sys.stderr)
            raise ConfigError(f"{several}{servers[0].url}", param="url")
        answer = line.strip()
        if not answer and may_be_all:
            return None
        if answer.isdecimal() and 1 <= int(answer) <= len(servers):
            return servers[int(answer) - 1]
