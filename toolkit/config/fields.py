"""The table of settings. A field of a config class is a setting: its name, type, default, bounds and help
text make the flag, the TK_* variable, the tk.toml key and the documentation.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from toolkit.errors import ConfigError, did_you_mean

T = TypeVar("T")

MASK = "***"
"""What is shown of a secret."""


def option(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    metavar: str | None = None,
    aliases: tuple[str, ...] = (),
    argument: bool = False,
    subject: str | None = None,
    common: bool = False,
) -> Any:
    """A dataclass field that is a setting. `argument`: it can also be given by position on the command line.
    `subject`: the heading that it and the fields after it stand under. `common`: in the help that fits one screen.
    """
    meta = {
        "help": help,
        "minimum": minimum,
        "maximum": maximum,
        "metavar": metavar,
        "aliases": aliases,
        "argument": argument,
        "subject": subject,
        "common": common,
    }
    return dataclasses.field(default=default, metadata=meta)


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table."""

    name: str
    type: type
    default: Any
    help: str
    optional: bool = False
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    metavar: str | None = None
    aliases: tuple[str, ...] = ()
    argument: bool = False
    subject: str | None = None
    common: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "TK_" + self.name.upper()

    @property
    def is_secret(self) -> bool:
        """Whether its value is nobody else's business: keys, and headers, which may hold them."""
        return self.name in ("header", "headers") or self.name.endswith(
            ("_key", "_token", "password")
        )

    def shown(self, value: Any) -> Any:
        """The value as it may be seen by others: masked when it is secret, and without the password in a URL."""
        if isinstance(value, list | tuple):
            return tuple(self.shown(one) for one in value)
        if not isinstance(value, str) or not value:
            return value
        return MASK if self.is_secret else re.sub(r"(?<=://)[^/@\s]+@", f"{MASK}@", value)

    @property
    def summary(self) -> str:
        """The first sentence of the help, which is all that one screen has room for."""
        return self.help.split(". ")[0].split("; ")[0].rstrip(".") + "."

    @property
    def shown_default(self) -> str:
        """The default as it follows the help: ' [8000]'. A None explains itself in the setting's own text."""
        if self.default in (None, (), ""):
            return ""
        if self.type is tuple:
            return f" [{', '.join(self.default)}]"
        shown = {True: "on", False: "off"}[self.default] if self.type is bool else self.default
        return f" [{shown}]"

    def check(self, value: Any, source: str | None = None) -> Any:
        """The value, converted where that loses nothing. Raises ConfigError naming `source`, or else the flag, and what it
        takes.
        """
        source = source or self.flag
        if value is None and (self.optional or self.default is None):
            return None
        if self.type is tuple:
            return self._check_several(value, source)
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, self.type) or (isinstance(value, bool) and self.type is not bool):
            raise ConfigError(
                f"{source} takes {_article(self.type)}, and got {value!r}.", param=self.name
            )
        if self.choices and value not in self.choices:
            listed = ", ".join(str(choice) for choice in self.choices)
            raise ConfigError(f"{source} is one of {listed}; it got {value!r}.", param=self.name)
        number: Any = value
        if number != number:
            raise ConfigError(
                f"{source} takes {_article(self.type)}, and got {value!r}.", param=self.name
            )
        if self.minimum is not None and number < self.minimum:
            raise ConfigError(
                f"{source} is at least {self.minimum}; it got {value!r}.", param=self.name
            )
        if self.maximum is not None and number > self.maximum:
            raise ConfigError(
                f"{source} is at most {self.maximum}; it got {value!r}.", param=self.name
            )
        return value

    def _check_several(self, value: Any, source: str) -> tuple[str, ...]:
        """One text, or a list of them."""
        several = (value,) if isinstance(value, str) else value
        if not isinstance(several, list | tuple) or not all(
            isinstance(one, str) and one for one in several
        ):
            raise ConfigError(
                f"{source} takes text, or several; it got {value!r}.", param=self.name
            )
        return tuple(several)

    def parse(self, text: str, source: str) -> Any:
        """The value that `text` (from a variable or a flag) stands for. Raises ConfigError naming `source`."""
        if self.type is tuple:
            return self.check([part.strip() for part in text.split(",") if part.strip()], source)
        if self.type is bool:
            lowered = text.strip().lower()
            if lowered in ("1", "true", "yes", "on"):
                return True
            if lowered in ("0", "false", "no", "off"):
                return False
            raise ConfigError(f"{source} is true or false; it got {text!r}.", param=self.name)
        try:
            return self.check(self.type(text), source)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{source} takes {_article(self.type)}, and got {text!r}.", param=self.name
            ) from None


def options(config: type) -> list[Option]:
    """The rows of one config class, in the order of its fields."""
    hints = typing.get_type_hints(config)
    rows = []
    subject = None
    for field in dataclasses.fields(config):
        if "help" not in field.metadata:
            continue
        base, optional, choices = _unwrap(hints[field.name])
        subject = field.metadata["subject"] or subject
        rows.append(
            Option(
                name=field.name,
                type=base,
                default=field.default,
                optional=optional,
                choices=choices,
                **{**field.metadata, "subject": subject},
            )
        )
    return rows


def check_all(config: Any) -> None:
    """For `__post_init__`: every setting of a frozen config is of its type and within its bounds."""
    for row in options(type(config)):
        object.__setattr__(config, row.name, row.check(getattr(config, row.name)))


def build(config: type[T], settings: Mapping[str, Any]) -> T:
    """A config from a mapping of its settings. Raises ConfigError for a name it does not have."""
    names = [row.name for row in options(config)]
    for name in settings:
        if name not in names:
            raise ConfigError(
                f"There is no setting {name!r}.{did_you_mean(name, names)}", param=name
            )
    return config(**settings)


def _unwrap(hint: Any) -> tuple[type, bool, tuple[Any, ...]]:
    """(base type, whether None is admitted, choices) of an annotation such as `Literal['a', 'b'] | None`."""
    optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        optional, hint = True, inner[0]
    if typing.get_origin(hint) is tuple:  # of any number of texts
        return tuple, optional, ()
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        return type(choices[0]), optional, choices
    return hint, optional, ()


def _article(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
