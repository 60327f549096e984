"""Logits processors: plug-ins that change the logits of requests that ask for them.

A request asks with `extra_args` (`vllm_xargs` over HTTP), a flat object as in vLLM: a processor
runs for a request that has one of its arguments. Imports no torch: front ends check arguments."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, get_args, get_origin

import msgspec

from toolkit import plugins
from toolkit.config.engine import PluginConfig
from toolkit.errors import InvalidParamError, PluginError, did_you_mean
from toolkit.plugins import Group, Plugin

if TYPE_CHECKING:
    import torch

A = TypeVar("A", bound=msgspec.Struct)


@dataclass(slots=True, eq=False)
class Row(Generic[A]):
    """A request that asks for a processor, as of the step that samples its next token."""

    arguments: A
    prompt_token_ids: list[int]
    token_ids: torch.Tensor
    """[num_tokens] int32 on the device: prompt and output. The host may not know the newest token
    yet, so reading it there waits for the device."""
    state: Any = None
    """Anything that the processor keeps. It starts as None: also after a preemption and after a
    crash of the engine, when `token_ids` already has output. While it is kept, `apply` sees each
    token once."""

    @property
    def output_token_ids(self) -> torch.Tensor:
        """[num_output_tokens] int32 on the device."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)


class LogitsProcessor(abc.ABC, Generic[A]):
    """Changes logits before the sampler reads them, in each worker of the last pipeline stage.

    `A` is a struct of the fields of `extra_args` that the processor reads, with types and defaults.
    Its `__post_init__` may raise ValueError. Ranks that share a layer each run the processor, and
    must compute the same: nothing may depend on time, on a random state or on other requests."""

    arguments_type: ClassVar[type[msgspec.Struct]]
    """`A`."""

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self.device, self.vocab_size = device, vocab_size

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for base in getattr(cls, "__orig_bases__", ()):
            if get_origin(base) is LogitsProcessor:
                [cls.arguments_type] = get_args(base)
        kind = getattr(cls, "arguments_type", None)
        if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            raise TypeError(
                f"{cls.__name__} must be a subclass of LogitsProcessor[A], with a msgspec.Struct A"
            )

    @classmethod
    def check(cls, arguments: A, vocab_size: int) -> None:
        """Raise ValueError for arguments that cannot work. Called in front ends, per request."""

    @abc.abstractmethod
    def apply(self, logits: torch.Tensor, rows: Sequence[Row[A]]) -> torch.Tensor:
        """Return new logits, or `logits` changed in place.

        logits: [len(rows), vocab] fp32, on the device. Penalties, biases, forbidden tokens,
        grammars, temperature and filters follow. An error ends the requests of `rows`."""


Processors = Mapping[Plugin, type[LogitsProcessor[Any]]]


def preload(config: PluginConfig) -> None:
    """Import the processors that a core may have, which may take seconds.

    Errors are left to the core to report."""
    named = plugins.named(Group.LOGITS_PROCESSORS, config.logits_processors)
    for plugin in (*plugins.installed(Group.LOGITS_PROCESSORS), *named):
        with suppress(PluginError):
            plugin.load()


def check_arguments(
    processors: Processors, extra_args: Mapping[str, Any] | None, vocab_size: int
) -> None:
    """Raise InvalidParamError for arguments that no processor reads or that cannot work."""
    for plugin, arguments in read_arguments(processors, extra_args).items():
        try:
            processors[plugin].check(arguments, vocab_size)
        except ValueError as error:
            raise _refused(plugin, error) from None


def read_arguments(
    processors: Processors, extra_args: Mapping[str, Any] | None
) -> dict[Plugin, msgspec.Struct]:
    """Return the arguments of each processor that a request asks for.

    Raises InvalidParamError for a name that no processor reads and for a value of a wrong type."""
    if not extra_args:
        return {}
    fields = {plugin: _fields(kind) for plugin, kind in processors.items()}
    known = {name for names in fields.values() for name in names}
    for name in extra_args:
        if name not in known:
            raise InvalidParamError("extra_args", _unknown(name, known))
    found: dict[Plugin, msgspec.Struct] = {}
    for plugin, kind in processors.items():
        given = {name: extra_args[name] for name in fields[plugin] if name in extra_args}
        if given:
            try:
                found[plugin] = msgspec.convert(given, kind.arguments_type)
            except ValueError as error:
                raise _refused(plugin, error) from None
    return found


def _fields(kind: type[LogitsProcessor[Any]]) -> tuple[str, ...]:
    return kind.arguments_type.__struct_encode_fields__


def _refused(plugin: Plugin, error: ValueError) -> InvalidParamError:
    text = str(error).replace("`$.", "`").rstrip(".")
    return InvalidParamError(
        "extra_args", f"cannot be used by the logits processor {plugin.name}: {text}."
    )


def _unknown(name: str, known: Collection[str]) -> str:
    if not known:
        return (
            f"has {name!r}, and this server has no logits processors. --logits-processors adds one."
        )
    names = ", ".join(sorted(known))
    return f"has no argument {name!r}.{did_you_mean(name, known)} Known: {names}."
