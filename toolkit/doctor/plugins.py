"""Check plug-ins in a separate process: `python -m toolkit.doctor.plugins` prints JSON.

Their code may be slow, or end its process."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from toolkit import plugins
from toolkit.doctor.finding import Finding
from toolkit.errors import PluginError
from toolkit.plugins import Group

TIMEOUT = 120.0  # seconds; a plug-in may import PyTorch


def check_plugins() -> Iterator[Finding]:
    """Load the plug-ins of installed packages, and report each."""
    if not any(plugins.installed(group) for group in Group):
        yield Finding("plug-ins", "pass", "none")
        return
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__], capture_output=True, text=True, timeout=TIMEOUT
        )
        found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        names = ", ".join(str(one) for group in Group for one in plugins.installed(group))
        yield Finding(
            "plug-ins",
            "fail",
            f"the process that loaded them ended or took more than {TIMEOUT:g} s: {names}",
            f"{sys.executable} -m {__name__}",
        )
        return
    for one in found:
        text = f"{one['name']} ({one['group']}) of {one['package']}"
        if one["error"] is None:
            yield Finding("plug-ins", "pass", text)
        else:
            fix = f"pip install --upgrade {one['package'].split(' ')[0]}"
            yield Finding("plug-ins", "fail", one["error"], fix)


def probe() -> list[dict[str, Any]]:
    """Return each plug-in with its error, or None."""
    from toolkit.models.config.registry import built_in
    from toolkit.text.parsers import OTHERS, REASONING_FORMATS, TOOL_FORMATS

    taken = {
        Group.MODELS: built_in(),
        Group.TOOL_PARSERS: (*TOOL_FORMATS, *OTHERS),
        Group.REASONING_PARSERS: (*REASONING_FORMATS, *OTHERS),
    }
    return [
        {
            "name": plugin.name,
            "group": str(group),
            "package": plugin.package,
            "error": loaded.message if isinstance(loaded, PluginError) else None,
        }
        for group in Group
        for plugin, loaded in plugins.examine(group, taken.get(group, ()))
    ]


if __name__ == "__main__":
    print(json.dumps(probe()))
