"""`tk collect-env`."""

from collections.abc import Iterator

from toolkit.cli.commands.config import DEFAULT, every_setting
from toolkit.cli.commands.doctor import findings
from toolkit.cli.help import Command
from toolkit.cli.root import app
from toolkit.errors import ConfigError
from toolkit.logs import escape_controls


@app.command("collect-env", cls=Command)
def collect_env() -> None:
    """Print the environment for a bug report, as Markdown.

    Versions, device, changed settings, and the problems that tk doctor finds.

    Keys, names of users and machines, addresses and the home folder are removed. Read the report
    before you send it."""
    from toolkit.doctor.environment import markdown
    from toolkit.doctor.probe import Probe

    probe = Probe()
    found = list(findings(probe))
    print(escape_controls(markdown(probe.facts(), found, _changed_settings())))


def _changed_settings() -> Iterator[tuple[str, str, str, str]]:
    """Yield (command, setting, value, origin) of the settings without their default."""
    try:
        for path, rows in every_setting().items():
            for row, one in rows:
                if one.origin != DEFAULT:
                    yield " ".join(path), row.name, str(row.mask(one.value)), one.origin
    except ConfigError:
        return  # the doctor reports it
