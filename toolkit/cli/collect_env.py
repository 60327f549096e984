"""`tk collect-env`."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.cli.config import DEFAULT, every_setting
from toolkit.cli.doctor import findings
from toolkit.cli.help import Command
from toolkit.cli.root import app
from toolkit.errors import ConfigError


@app.command("collect-env", cls=Command)
def collect_env() -> None:
    """Print what a report of a fault needs, as Markdown.

    Versions, device, settings that are no defaults, and what tk doctor finds wrong.

    Keys, names of users and machines, addresses and the home folder are taken out. Read it before you send it all the
    same.
    """
    from toolkit.doctor.environment import markdown
    from toolkit.doctor.probe import Probe

    probe = Probe()
    found = list(findings(probe))
    print(markdown(probe.facts(), found, _given()))


def _given() -> Iterator[tuple[str, str, str, str]]:
    """(command, setting, value, origin) of what is not left to its default."""
    try:
        for path, rows in every_setting().items():
            for row, one in rows:
                if one.origin != DEFAULT:
                    yield " ".join(path), row.name, str(row.shown(one.value)), one.origin
    except ConfigError:
        return  # a finding of the doctor's tells of it
