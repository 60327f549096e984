"""Logits processors of one device, and the requests that ask for them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from toolkit import plugins
from toolkit.config.engine import PluginConfig
from toolkit.hardware.memory import is_fatal, is_out_of_memory, to_device
from toolkit.plugins import Group, Plugin
from toolkit.sampling.logits_processors import LogitsProcessor, Row, read_arguments
from toolkit.sequence import SequenceSpec

logger = logging.getLogger(__name__)

IntArray = npt.NDArray[np.int32]
Loaded = Mapping[Plugin, LogitsProcessor[Any]]
NO_PROCESSORS: Loaded = {}


def load_processors(config: PluginConfig, device: torch.device, vocab_size: int) -> Loaded:
    """Make the processors of installed packages, by name, then those that flags name.

    Raises PluginError as `plugins.load_installed` does."""
    found: dict[Plugin, LogitsProcessor[Any]] = {}
    kinds = plugins.load_installed(Group.LOGITS_PROCESSORS, strict=config.strict_plugins)
    named = plugins.named(Group.LOGITS_PROCESSORS, config.logits_processors)
    for plugin, kind in (kinds | {one: one.load() for one in named}).items():
        try:
            found[plugin] = kind(device, vocab_size)
        except Exception as error:
            strict = config.strict_plugins or plugin in named
            plugins.report(plugin.error(error), strict=strict)
    return found


class ProcessorRows:
    """Row r has the processors of the request in row r."""

    def __init__(self, num_rows: int, processors: Loaded) -> None:
        self._processors = processors
        self._kinds = {plugin: type(one) for plugin, one in processors.items()}
        self._rows: dict[Plugin, dict[int, Row[Any]]] = {plugin: {} for plugin in processors}
        self._failures: dict[int, str] = {}  # by row
        self.asked = np.zeros(num_rows, np.bool_)

    def set(self, row: int, spec: SequenceSpec) -> None:
        """Give a row to a request."""
        for rows in self._rows.values() if self.asked[row] else ():
            rows.pop(row, None)
        arguments = read_arguments(self._kinds, spec.params.extra_args)
        for plugin, one in arguments.items():
            self._rows[plugin][row] = Row(one, spec.prompt_token_ids, torch.empty(0))
        self.asked[row] = bool(arguments)

    def apply(
        self, logits: torch.Tensor, token_ids: torch.Tensor, rows: IntArray, lengths: IntArray
    ) -> None:
        """Change logits in place. For arguments see `sampler.sample`.

        The logits of a request whose processor fails become NaN, so that no token is sampled."""
        self._failures = {}
        for plugin, asking in self._rows.items():
            which = [
                index
                for index, row in enumerate(rows.tolist())
                if row in asking and row not in self._failures
            ]
            if not which:
                continue
            asked = [asking[row] for row in rows[which].tolist()]
            for one, row, length in zip(asked, rows[which], lengths[which], strict=True):
                one.token_ids = token_ids[row, :length]
            index = to_device(torch.tensor(which), logits.device)
            try:
                logits[index] = _run(self._processors[plugin], logits[index], asked)
            except Exception as error:
                if is_fatal(error) or is_out_of_memory(error):
                    raise
                logger.error("%s failed in a step", plugin, exc_info=error)
                logits[index] = torch.nan
                failure = f"{plugin} failed: {plugins.summary(error)}"
                self._failures |= dict.fromkeys(rows[which].tolist(), failure)

    def take_failures(self, rows: IntArray) -> dict[int, str]:
        """Return the errors of these rows in the last `apply`, by index into `rows`."""
        failures, self._failures = self._failures, {}
        if not failures:
            return {}
        return {i: failures[row] for i, row in enumerate(rows.tolist()) if row in failures}


def _run(
    processor: LogitsProcessor[Any], logits: torch.Tensor, rows: list[Row[Any]]
) -> torch.Tensor:
    changed = processor.apply(logits, rows)
    if not isinstance(changed, torch.Tensor) or changed.shape != logits.shape:
        shape = tuple(changed.shape) if isinstance(changed, torch.Tensor) else changed
        raise TypeError(f"apply must return logits of shape {tuple(logits.shape)}, not {shape!r}")
    return changed.to(logits.dtype)
