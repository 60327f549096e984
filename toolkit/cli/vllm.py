"""Command lines of vLLM, llama.cpp and Whisper, rewritten with tk's flags.

`config.vllm`, `config.llama_cpp` and `config.whisper` have the tables."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from toolkit.config import llama_cpp, whisper
from toolkit.config.fields import Option, parse_field, parse_int
from toolkit.config.vllm import BENCH, DEFAULTS, SERVE, Note, Outcome, Refusal, Table, Use, Variable
from toolkit.errors import ConfigError

TABLES: Mapping[str, Table] = {
    "serve": SERVE + llama_cpp.SERVE,
    "bench serve": BENCH,
    "transcribe": whisper.TRANSCRIBE,
}
"""Tables by the words of a command."""


@dataclass(slots=True)
class Rule:
    """Outcomes of a flag by value. The value "" stands for all others, and for a switch's."""

    takes: str  # "", "one" or "several" values
    outcomes: dict[str, Outcome] = field(default_factory=dict)


@cache
def rules_of(command: str) -> Mapping[str, Rule]:
    """Return the rules of a command's table by flag."""
    rules: dict[str, Rule] = {}
    for outcome, flags in TABLES.get(command, ()):
        for text in flags.split():
            name, has_value, value = text.partition("=")
            takes = "several" if value == "..." else "one" if has_value else ""
            rule = rules.setdefault(name, Rule(takes))
            rule.outcomes[value.removeprefix("...")] = outcome
    return rules


def translate(
    words: Sequence[str], settings: Mapping[str, Option], command: str, *, is_group: bool = False
) -> tuple[list[str], list[str]]:
    """Return a command line with tk's flags, and notes about flags that have no effect.

    `command`: the words of a command, without the program's name. The words of a subcommand, after
    those of a group, are left alone. For all commands, underscores in a flag count as dashes,
    `--disable-x` is the opposite of `--enable-x`, and `--flag.key value` sets a field of a JSON
    object. Flags that stand for environment variables set them. Raises ConfigError with all flags
    that the command's table refuses, for a flag in the place of a value, and for a YAML file that
    cannot be read."""
    translation = _Translation(settings, rules_of(command), stops_at_word=is_group)
    words = words if is_group else _with_yaml(words, settings)
    return translation.run(words), translation.notes


def _with_yaml(words: Sequence[str], settings: Mapping[str, Option]) -> list[str]:
    """Replace `--config FILE.yaml` by the flags in the file. The command line overrides them.

    An argument before all flags, such as MODEL, overrides the flag of the same setting."""
    given = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    if words and not words[0].startswith("-"):
        given.update(row.flag for row in settings.values() if row.argument)
    for index, word in enumerate(words):
        name, has_value, value = word.partition("=")
        path = value if has_value else "".join(words[index + 1 : index + 2])
        if name == "--config" and path.endswith((".yaml", ".yml")):
            end = index + (1 if has_value else 2)
            flags = [
                flag
                for flag in _read_yaml(path)
                if flag.partition("=")[0].replace("_", "-") not in given
            ]
            return [*flags, *words[:index], *words[end:]]
    return list(words)


def _read_yaml(path: str) -> list[str]:
    """Return the flags in a YAML file, whose keys are flags without dashes."""
    import yaml  # type: ignore[import-untyped]  # has no types

    try:
        content = yaml.safe_load(Path(path).expanduser().read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigError(f"--config cannot read {path}: {why}.", param="config") from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"--config: {path} must have lines such as 'max-model-len: 8192'.", param="config"
        )
    return [word for key, value in content.items() for word in _as_flags(str(key), value)]


def _as_flags(key: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no-{key}"]
    values = value if isinstance(value, list) else [value]
    return [
        f"--{key}={json.dumps(one) if isinstance(one, dict) else one}"
        for one in values
        if one is not None
    ]


class _Translation:
    """State while a command line is read."""

    def __init__(
        self, settings: Mapping[str, Option], rules: Mapping[str, Rule], *, stops_at_word: bool
    ) -> None:
        self.notes: list[str] = []
        self._refused: list[tuple[str, str]] = []  # flags, and why
        self._rules, self._stops_at_word = rules, stops_at_word
        self._objects = {row.flag: row for row in settings.values() if row.type is dict}
        own = {flag: row for row in settings.values() for flag in (row.flag, *row.aliases)}
        self._with_value = {"--config", *(f for f, row in own.items() if row.type is not bool)}
        self._switches = {f for f, row in own.items() if row.type is bool}
        self._switches |= {name for name, rule in rules.items() if not rule.takes}
        self._known = {*own, *rules, *(f"--no-{f[2:]}" for f in own if f not in self._with_value)}
        self._fields: dict[str, dict[str, Any]] = {}  # of objects, by flag
        self._values: dict[str, str] = {}  # of the table's flags, by name without dashes
        self._later: list[tuple[Use, str]] = []
        self._variables: dict[str, str] = {}

    def run(self, words: Sequence[str]) -> list[str]:
        """Return the words with tk's flags."""
        rest, found = deque(words), list[str]()
        while rest and rest[0] != "--":
            if not rest[0].startswith("-"):
                if self._stops_at_word:
                    break
                found.append(rest.popleft())
                continue
            word = rest.popleft()
            name, path, value = self._split(word)
            if name.replace("--no-", "--", 1) in self._switches:
                self._check_switch(word.partition("=")[0], value, rest)
            rule = self._rule(name, value)
            if path and name in self._objects:
                self._set_field(name, path, self._value(name, value, rest))
            elif rule is not None:
                self._apply(name, rule, value, rest, found)
            elif value is None and name in self._with_value and rest:
                found += [name, self._value(name, None, rest)]
            else:
                found.append(_joined(name + path, value))
        if self._refused:
            lines = "\n".join(f"tk has no {shown}. {why}" for shown, why in self._refused)
            raise ConfigError(lines, param=self._refused[0][0].partition(" ")[0])
        os.environ.update(self._variables)
        before, after = self._ordered(-1), self._ordered(1)
        return [*self._with_fields([*before, *found, *after]), *rest]

    def _split(self, word: str) -> tuple[str, str, str | None]:
        """Return a word's flag, the path of a field (`.a.b`) and the value; None if it has none."""
        if "-O" in self._rules and re.match("-O[^=]", word):
            return "-O", "", word[2:]
        flag, has_value, value = word.partition("=")
        name, dot, path = flag.partition(".")
        if name.startswith("--"):
            name = self._opposite(f"--{name[2:].replace('_', '-')}")
        return name, dot + path, value if has_value else None

    def _check_switch(self, name: str, value: str | None, rest: deque[str]) -> None:
        """Raise ConfigError for `--switch=true`, and for `--switch true` in lines of vLLM."""
        if value is None and self._rules and rest and rest[0].lower() in ("true", "false"):
            value = rest[0]
        if value is not None:
            opposite = f"--{name[5:]}" if name.startswith("--no-") else f"--no-{name[2:]}"
            either = f", or {opposite} for the opposite" if name.startswith("--") else ""
            raise ConfigError(
                f"{name} takes no value; got {value!r}. Write {name} alone{either}.", param=name
            )

    def _opposite(self, name: str) -> str:
        """Return --no-enable-x for --disable-x, and so on, if only that is known."""
        found = re.fullmatch("--(no-)?(enable|disable)-(.+)", name)
        if found is not None and name not in self._known:
            other = f"{'disable' if found[2] == 'enable' else 'enable'}-{found[3]}"
            if f"--{other}" in self._known:
                return f"--{other}" if found[1] else f"--no-{other}"
        return name

    def _rule(self, name: str, value: str | None) -> Rule | None:
        """Return the rule for a flag; None if it is tk's own or unknown."""
        rule = self._rules.get(name)
        if rule is None and name.startswith("--no-") and name not in self._known:
            switch = self._rules.get(f"--{name[5:]}")
            if switch is not None and not switch.takes:
                outcome = switch.outcomes[""]
                return Rule("", {"": outcome if isinstance(outcome, Note) else _OFF})
        return None if name == "--help" and value is None else rule

    def _apply(
        self, name: str, rule: Rule, value: str | None, rest: deque[str], found: list[str]
    ) -> None:
        text = self._value(name, value, rest) if rule.takes else value or ""
        while rule.takes == "several" and rest and not rest[0].startswith("-"):
            text += f" {rest.popleft()}"
        outcome = (
            rule.outcomes.get(text, rule.outcomes.get("")) if rule.takes else rule.outcomes[""]
        )
        shown = f"{name} {text}" if len(rule.outcomes) > 1 or name in self._with_value else name
        self._values[name.lstrip("-")] = text
        match outcome:
            case None:  # one of the values that tk has too
                found += [name, text]
            case Note(reason):
                self.notes.append(f"{shown} has no effect. {reason}.")
            case Variable(variable):
                self._variables[variable] = os.path.abspath(os.path.expanduser(text))
            case Refusal(advice):
                self._refused.append((shown, advice))
            case Use() if outcome.order:
                self._later.append((outcome, text))
            case Use():
                rest.extendleft(reversed(self._filled(outcome, text, name)))

    def _value(self, name: str, value: str | None, rest: deque[str]) -> str:
        if value is not None:
            return value
        if not rest:
            raise ConfigError(f"{name} needs a value.", param=name)
        if self._split(rest[0])[0] in self._known:
            raise ConfigError(
                f"{name} needs a value, and {rest[0]} after it is a flag. If it is the value, "
                f"write {name}={rest[0]}.",
                param=name,
            )
        return rest.popleft()

    def _filled(self, use: Use, value: str, name: str = "") -> list[str]:
        """Return tk's flags for a value."""
        if use.divisor != 1:
            try:
                value = repr(parse_int(value) / use.divisor)
            except ValueError:
                raise ConfigError(
                    f"{name} must be a number such as 8g or 8G; got {value!r}.", param=name
                ) from None
        given = DEFAULTS | self._values
        places = {"{host}": given["host"], "{port}": given["port"], "{}": value}
        return [
            re.sub(r"\{\w*\}", lambda found: places[found[0]], word) for word in use.flags.split()
        ]

    def _ordered(self, order: int) -> list[str]:
        return [
            word
            for use, value in self._later
            if use.order == order
            for word in self._filled(use, value)
        ]

    def _set_field(self, name: str, path: str, text: str) -> None:
        """Set a field of an object. `--flag.key+ a,b` appends to a list."""
        keys = path[1:].removesuffix("+").split(".")
        value: Any = text.split(",") if path.endswith("+") else parse_field(text)
        inner = self._fields.setdefault(name, {})
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{name}{path}: {key} is not an object.", param=name)
        if path.endswith("+"):
            value = [*inner.get(keys[-1], []), *value]
        inner[keys[-1]] = value

    def _with_fields(self, words: list[str]) -> list[str]:
        """Add the objects whose fields were set one by one to those given as JSON."""
        for name, fields in self._fields.items():
            given: dict[str, Any] = {}
            for index in reversed(range(len(words))):
                flag, has_value, text = words[index].partition("=")
                if flag == name and (has_value or index + 1 < len(words)):
                    end = index + (1 if has_value else 2)
                    text = text if has_value else words[index + 1]
                    given = self._objects[name].parse(text, name)
                    words = [*words[:index], *words[end:]]
            words = [*words, f"{name}={json.dumps(_merged(given, fields))}"]
        return words


_OFF = Note("That is off in tk")


def _joined(name: str, value: str | None) -> str:
    return name if value is None else f"{name}={value}"


def _merged(given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with fields of another one added, at any depth."""
    both = {
        key: _merged(given[key], value)
        for key, value in fields.items()
        if isinstance(value, dict) and isinstance(given.get(key), dict)
    }
    return {**given, **fields, **both}
