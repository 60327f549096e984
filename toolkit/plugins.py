"""Plug-ins: code of other packages that tk runs. Imports nothing slow.

A plug-in is an entry point of an installed package, or what a flag names. Nothing else is loaded:
the folder of a checkpoint cannot bring code."""

import importlib.util
import inspect
import logging
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from toolkit.errors import ConfigError, PluginError, did_you_mean

logger = logging.getLogger(__name__)


class Group(StrEnum):
    """Kind of a plug-in. The value is the name of the group of entry points."""

    MODELS = "tk.models"
    LOGITS_PROCESSORS = "tk.logits_processors"
    TOOL_PARSERS = "tk.tool_parsers"
    REASONING_PARSERS = "tk.reasoning_parsers"
    MIDDLEWARE = "tk.middleware"


_NEEDED = {
    Group.MODELS: ("ARCHITECTURES", "Config", "describe"),
    Group.LOGITS_PROCESSORS: ("arguments_type", "check", "apply"),
    Group.TOOL_PARSERS: ("markers", "grammar", "add", "end"),
    Group.REASONING_PARSERS: ("start", "end", "reasoning_after", "add"),
    Group.MIDDLEWARE: ("__call__",),
}
"""Attributes that a plug-in must have."""
_CHOSEN_BY_NAME = (Group.MODELS, Group.TOOL_PARSERS, Group.REASONING_PARSERS)
"""Groups in which two plug-ins cannot have the same name."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plug-in, not loaded. Equal in all processes of a server."""

    group: Group
    name: str
    target: str  # MODULE:OBJECT, or MODULE
    package: str = ""  # that brings it, with its version; empty if a flag names it

    def __str__(self) -> str:
        if not self.package:
            return f"the plug-in {self.target} ({self.group})"
        return f"the plug-in {self.name!r} of {self.package} ({self.group}, {self.target})"

    def load(self) -> Any:
        """Import it. Raises PluginError."""
        return _load(self)

    def error(self, problem: str | BaseException) -> PluginError:
        """Return the error that it cannot be used."""
        if isinstance(problem, BaseException):
            problem = summary(problem)
        advice = f"Update or uninstall {self.package.split(' ')[0]}" if self.package else "Fix it"
        return PluginError(f"Cannot use {self}: {problem.rstrip('.')}. {advice}.")


def summary(error: BaseException) -> str:
    """Return an error's type and text in one line."""
    text = " ".join(str(error).split())
    return type(error).__name__ + (f": {text}" if text else "")


@cache
def installed(group: Group) -> tuple[Plugin, ...]:
    """Return the entry points of installed packages, by name. A model's is its `model_type`."""
    found = []
    for point in entry_points(group=group):
        name = point.name
        if group is Group.MODELS:
            name = re.sub(r"\W", "_", name)
        target = f"{point.module}:{point.attr}" if point.attr else point.module
        package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "?"
        found.append(Plugin(group, name, target, package))
    return tuple(sorted(found, key=lambda plugin: (plugin.name, plugin.target)))


def named(group: Group, targets: Sequence[str]) -> list[Plugin]:
    """Return the plug-ins that a flag names as MODULE:OBJECT. Raises ConfigError."""
    for target in targets:
        if not all(target.partition(":")):
            setting = group.partition(".")[2]
            hint = f" Did you mean {':'.join(target.rsplit('.', 1))}?" if "." in target else ""
            raise ConfigError(
                f"--{setting.replace('_', '-')} takes MODULE:NAME; got {target!r}.{hint}",
                param=setting,
            )
    return [Plugin(group, target.partition(":")[2], target) for target in targets]


def examine(
    group: Group, built_in: Collection[str] = ()
) -> Iterator[tuple[Plugin, Any | PluginError]]:
    """Yield the installed plug-ins of a group, each loaded or with the error.

    `built_in`: names that tk has itself. A plug-in does not replace them."""
    packages: dict[str, str] = {}
    for plugin in installed(group):
        problem = None
        if plugin.name in built_in:
            problem = f"tk has its own {plugin.name!r}, which is used"
        elif group in _CHOSEN_BY_NAME and plugin.name in packages:
            problem = f"{packages[plugin.name]} has one of the same name, which is used"
        try:
            loaded = plugin.load() if problem is None else plugin.error(problem)
        except PluginError as error:
            loaded = error
        if not isinstance(loaded, PluginError):
            packages[plugin.name] = plugin.package
        yield plugin, loaded


def load_installed(
    group: Group, built_in: Collection[str] = (), *, strict: bool
) -> dict[Plugin, Any]:
    """Load the installed plug-ins of a group, by name.

    A broken one is logged and left out. If `strict`, it raises PluginError."""
    found = {}
    for plugin, loaded in examine(group, built_in):
        if not isinstance(loaded, PluginError):
            found[plugin] = loaded
        else:
            report(loaded, strict=strict)
    return found


def report(error: PluginError, *, strict: bool) -> None:
    """Log an error once per process or, if `strict`, raise it."""
    if strict:
        raise error
    _warn(error.message)


def choose(
    name: str,
    flag: str,
    group: Group,
    built_in: Mapping[str, Any],
    others: Collection[str] = (),
    *,
    file: str | None,
    strict: bool,
) -> Any:
    """Return the object that a flag names: a built-in, an installed plug-in, or one of `file`.

    Returns None for a name in `others`. All plug-ins are loaded. Raises ConfigError that lists the
    known names, and PluginError if a plug-in that is needed is broken."""
    taken, known = {*built_in, *others}, dict(built_in)
    for plugin, loaded in examine(group, taken):
        if isinstance(loaded, PluginError):
            is_needed = plugin.name == name and name not in {*taken, *known}
            report(loaded, strict=strict or is_needed)
        else:
            known[plugin.name] = loaded
    if file is not None:
        known |= _read_file(group, file, taken)
    if name in others or name in known:
        return known.get(name)
    names = [*others, *known]
    hint = did_you_mean(name, names) or (
        " auto, the default, detects the format. docs/plugins.md says how to add another."
    )
    raise ConfigError(
        f"{flag} must be one of {', '.join(names)}; got {name!r}.{hint}",
        param=flag.removeprefix("--").replace("-", "_"),
    )


@cache
def _load(plugin: Plugin) -> Any:
    if not plugin.package and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that its files hide no other module
    module, _, path = plugin.target.partition(":")
    try:
        found: Any = import_module(module)
        for name in filter(None, path.split(".")):
            found = getattr(found, name)
    except (Exception, SystemExit) as error:
        raise plugin.error(error) from error
    _require_usable(plugin, found)
    return found


def _require_usable(plugin: Plugin, found: Any) -> None:
    missing = [name for name in _NEEDED[plugin.group] if not hasattr(found, name)]
    if missing:
        raise plugin.error(f"it has no {', '.join(missing)}")
    if plugin.group is Group.MIDDLEWARE:
        if not (inspect.isclass(found) or inspect.iscoroutinefunction(found)):
            raise plugin.error("it is neither a class nor an async function")
    elif plugin.group is not Group.MODELS and not inspect.isclass(found):
        raise plugin.error("it is not a class")
    elif abstract := sorted(getattr(found, "__abstractmethods__", ())):
        raise plugin.error(f"it does not implement {', '.join(abstract)}")


def _read_file(group: Group, path: str, taken: Collection[str]) -> dict[str, Any]:
    """Return the plug-ins of a Python file, which names them in a dict such as TOOL_PARSERS.

    Raises PluginError."""
    here = Plugin(group, path, path)
    table = group.partition(".")[2].upper()
    try:
        found = getattr(_import_file(Path(path).resolve()), table, None)
    except (Exception, SystemExit) as error:
        raise here.error(error) from error
    if not isinstance(found, dict) or not found:
        raise here.error(f'it has no {table} = {{"name": Class}}')
    for name, one in found.items():
        if name in taken:
            raise here.error(f"tk has its own {name!r}. Choose another name")
        _require_usable(Plugin(group, name, f"{path}:{name}"), one)
    return found


@cache
def _import_file(path: Path) -> ModuleType:
    name = f"tk_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@cache
def _warn(message: str) -> None:
    logger.warning("%s --strict-plugins makes this an error.", message)
