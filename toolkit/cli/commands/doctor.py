"""`tk doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.commands.config import DEFAULT, every_setting
from toolkit.cli.help import Command, known_settings
from toolkit.cli.root import app, tree
from toolkit.config import ServerConfig
from toolkit.config.fields import options
from toolkit.errors import ConfigError

if TYPE_CHECKING:
    from toolkit.doctor.finding import Finding
    from toolkit.doctor.probe import Probe


@app.command("doctor", cls=Command)
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Check whether this machine can serve, and say what to fix.

    Checks driver, PyTorch, kernels, compiler, memory, disk, limits, packages, plug-ins, settings,
    port, downloads, manual and completions. Exits with 1 if a check fails; warnings do not count.
    """
    from toolkit.doctor.probe import Probe
    from toolkit.doctor.report import report

    raise typer.Exit(report(findings(Probe()), as_json=json))


def findings(probe: Probe) -> Iterator[Finding]:
    """Run all checks, the slow ones last."""
    from toolkit.doctor.installation import check_installation
    from toolkit.doctor.machine import check_machine, check_torch
    from toolkit.doctor.plugins import check_plugins

    yield from check_machine()
    server, found = _settings()
    yield found
    names = {name for each in known_settings(tree()).values() for name in each}
    yield from check_installation(sorted(names), server.host, server.port)
    yield from check_torch(probe.facts())
    yield from check_plugins()


def _settings() -> tuple[ServerConfig, Finding]:
    """Return the server's settings, and whether all settings can be read."""
    from toolkit.doctor.finding import Finding

    try:
        given = {
            row.name: one
            for path, rows in every_setting().items()
            for row, one in rows
            if one.origin != DEFAULT and path == ("serve",)
        }
        names = {row.name for row in options(ServerConfig)}
        server = ServerConfig(**{name: one.value for name, one in given.items() if name in names})
    except ConfigError as error:
        return ServerConfig(), Finding(
            "settings", "fail", error.message, "'tk man tk.toml' describes the settings."
        )
    listed = ", ".join(f"{name} ({one.origin})" for name, one in given.items())
    return server, Finding("settings", "pass", f"server: {listed}" if listed else "server defaults")
