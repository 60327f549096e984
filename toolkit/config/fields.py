"""The table of settings. A field of a config class is a setting.

Its name, type, default, bounds and help text define the flag, the TK_* variable, the tk.toml key
and the documentation."""

import dataclasses
import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from toolkit.errors import ConfigError, did_you_mean

T = TypeVar("T")

MASK = "***"  # shown in place of a secret
MULTIPLIERS = {
    letter: base**power
    for letters, base in (("kmgt", 1000), ("KMGT", 1024))
    for power, letter in enumerate(letters, 1)
}  # suffixes of whole numbers, as in vLLM: 8k is 8,000, 8K is 8,192


class Word(str):
    """The only argument of a command line that takes a model and a prompt: it may be either."""

    __slots__ = ()


def option(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    metavar: str | None = None,
    aliases: tuple[str, ...] = (),
    argument: bool = False,
    may_be_prompt: bool = False,
    subject: str | None = None,
    common: bool = False,
) -> Any:
    """Declare a dataclass field that is a setting.

    `argument`: also a positional argument on the command line. `may_be_prompt`: a `Word` if it is
    the only one. `subject`: heading of this field and those after it. `common`: part of the short
    help."""
    meta = {
        "help": help,
        "minimum": minimum,
        "maximum": maximum,
        "metavar": metavar,
        "aliases": aliases,
        "argument": argument,
        "may_be_prompt": may_be_prompt,
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
    may_be_prompt: bool = False
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
        """True for keys, and for headers, which may hold keys."""
        return self.name in ("header", "headers") or self.name.endswith(
            ("_key", "_token", "password")
        )

    def is_blank_key(self, value: Any) -> bool:
        """True for a key without text, which would leave the server open."""
        values = value if isinstance(value, list | tuple) else (value,)
        return self.name.endswith("_key") and any(
            isinstance(one, str) and not one.strip() for one in values
        )

    def mask(self, value: Any) -> Any:
        """Return the value with secrets masked, and without credentials in URLs."""
        if isinstance(value, list | tuple):
            return tuple(self.mask(one) for one in value)
        if not isinstance(value, str) or not value:
            return value
        return MASK if self.is_secret else re.sub(r"(?<=://)[^/@\s]+@", f"{MASK}@", value)

    @property
    def summary(self) -> str:
        """First sentence of the help, for the short help."""
        return self.help.split(". ")[0].split("; ")[0].rstrip(".") + "."

    @property
    def default_suffix(self) -> str:
        """The default, appended to the help: ' [8000]'. If it is None, the help explains it."""
        if self.default in (None, (), ""):
            return ""
        if self.type is tuple:
            return f" [{', '.join(self.default)}]"
        text = {True: "on", False: "off"}[self.default] if self.type is bool else self.default
        return f" [{text}]"

    def check(self, value: Any, source: str | None = None) -> Any:
        """Return the value, converted if nothing is lost by it.

        Raises ConfigError that names `source` (default: the flag) and the accepted values."""
        source = source or self.flag
        if self.is_blank_key(value):
            raise ConfigError(f"{source} is empty. Set a key, or leave it out.", param=self.name)
        if value is None and (self.optional or self.default is None):
            return None
        if self.type is tuple:
            return self._check_list(value, source)
        if self.type is dict and isinstance(value, str):
            value = self._parse_object(value, source)
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, self.type) or (isinstance(value, bool) and self.type is not bool):
            raise ConfigError(
                f"{source} must be {_type_name(self.type)}; got {value!r}.", param=self.name
            )
        if self.choices and value not in self.choices:
            listed = ", ".join(str(choice) for choice in self.choices)
            raise ConfigError(f"{source} must be one of {listed}; got {value!r}.", param=self.name)
        number: Any = value
        if number != number:
            raise ConfigError(
                f"{source} must be {_type_name(self.type)}; got {value!r}.", param=self.name
            )
        if self.minimum is not None and number < self.minimum:
            raise ConfigError(
                f"{source} must be at least {self.minimum}; got {value!r}.", param=self.name
            )
        if self.maximum is not None and number > self.maximum:
            raise ConfigError(
                f"{source} must be at most {self.maximum}; got {value!r}.", param=self.name
            )
        return value

    def _check_list(self, value: Any, source: str) -> tuple[str, ...]:
        values = (value,) if isinstance(value, str) else value
        if not isinstance(values, list | tuple) or not all(
            isinstance(one, str) and one for one in values
        ):
            raise ConfigError(
                f"{source} must be text or a list of texts, none empty; got {value!r}.",
                param=self.name,
            )
        return tuple(values)

    def _parse_object(self, text: str, source: str) -> Any:
        """Parse an object: JSON, or fields such as `image=4,video=0`."""
        if re.fullmatch(r"\s*\w+=[^{[]*", text):
            pairs = [part.partition("=") for part in text.split(",")]
            return {key.strip(): parse_field(value.strip()) for key, _, value in pairs}
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{source} is not valid JSON: {error}. It got {text!r}.", param=self.name
            ) from None

    def parse(self, text: str, source: str) -> Any:
        """Parse the text of a variable or a flag. Raises ConfigError that names `source`."""
        if self.type is dict:
            return self.check(text, source)
        if self.type is tuple:
            if text.lstrip().startswith("["):
                return self.check(_parse_list(text), source)
            parts = [part.strip() for part in text.split(",") if part.strip()]
            if not parts and self.is_blank_key(""):
                parts = [""]  # refused: a variable that is set must hold a key
            return self.check(parts, source)
        if self.type is bool:
            lowered = text.strip().lower()
            if lowered in ("1", "true", "yes", "on"):
                return True
            if lowered in ("0", "false", "no", "off"):
                return False
            raise ConfigError(f"{source} must be true or false; got {text!r}.", param=self.name)
        try:
            value = parse_int(text) if self.type is int else self.type(text)
            return self.check(value, source)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{source} must be {_type_name(self.type)}; got {text!r}.", param=self.name
            ) from None


def parse_int(text: str) -> int:
    """Parse a whole number such as 8192, 8k, 8K or 1.5m. Raises ValueError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)([kmgtKMGT])\s*", text)
    if found is None:
        return int(text)
    number = float(found[1]) * MULTIPLIERS[found[2]]
    if not number.is_integer():
        raise ValueError(f"{text} is not a whole number")
    return int(number)


def parse_field(text: str) -> Any:
    """Return the value of an object's field: JSON, a number such as 8k, or text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        try:
            return parse_int(text)
        except ValueError:
            return text


def _parse_list(text: str) -> Any:
    """Return a list in JSON, or the text if it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def options(config: type) -> list[Option]:
    """Return the settings of a config class, in the order of its fields."""
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
    """Check type and bounds of every setting of a frozen config. For `__post_init__`."""
    for row in options(type(config)):
        object.__setattr__(config, row.name, row.check(getattr(config, row.name)))


def build(config: type[T], settings: Mapping[str, Any]) -> T:
    """Build a config from a mapping of its settings. Raises ConfigError for an unknown name."""
    names = [row.name for row in options(config)]
    for name in settings:
        if name not in names:
            raise ConfigError(f"Unknown setting {name!r}.{did_you_mean(name, names)}", param=name)
    return config(**settings)


def _unwrap(hint: Any) -> tuple[type, bool, tuple[Any, ...]]:
    """Return (type, is optional, choices) of an annotation such as `Literal['a', 'b'] | None`."""
    optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        optional, hint = True, inner[0]
    container = {tuple: tuple, Mapping: dict}.get(typing.get_origin(hint))
    if container is not None:  # tuple[str, ...], Mapping[str, Any]
        return container, optional, ()
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        return type(choices[0]), optional, choices
    return hint, optional, ()


def _type_name(kind: type) -> str:
    return {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        dict: "a JSON object",
    }[kind]
