"""Fill a model with the weights of a checkpoint, without a second copy of them in memory."""

from __future__ import annotations

import json
import threading
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from toolkit.errors import CheckpointError, did_you_mean
from toolkit.weights.quantization import METHODS
from toolkit.weights.safetensors import read_header, read_into
from toolkit.weights.slots import QuantizedSlot, Slot, Slots

_PREFIXES = ("transformer.", "model.", "bert.", "roberta.")
_QUANTIZED = {method.DTYPE for method in METHODS.values()}
_NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")
"""Buffers that old checkpoints carry along."""


class Fillable(Protocol):
    """What weights are loaded into."""

    unused: ClassVar[tuple[str, ...]]
    """What the names of those tensors of its checkpoints have that it does not need."""

    def slots(self) -> Slots:
        """Where each tensor of a checkpoint goes."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """As of any module."""
        ...


def load_weights(
    model: Fillable, folder: Path, load_format: str, seed: int = 0, elsewhere: Iterable[str] = ()
) -> None:
    """Fills the model. Raises CheckpointError as `find_weights` and what that returns."""
    find_weights(model, folder, load_format, seed, elsewhere)(threading.Event())


def find_weights(
    model: Fillable, folder: Path, load_format: str, seed: int = 0, elsewhere: Iterable[str] = ()
) -> Callable[[threading.Event], None]:
    """What fills the model, on any thread, or ends early once the event is set. Raises CheckpointError naming the file and the tensor
    that are wrong, missing or cut short: at once where the files' headers tell, and else when it fills. `elsewhere`: names of tensors
    that another stage of the model needs.
    """
    fill: Callable[[threading.Event], None]
    if load_format == "dummy":
        fill = partial(_fill_dummy, model, seed)
    else:
        places = _Places(model, elsewhere)
        files = _weight_files(folder, "model", "safetensors")
        if files:
            found = [
                (tensor.part(slot.region), slot)
                for file in files
                for tensor in read_header(file)
                for slot in places.find(file, tensor.name, tensor.shape)
            ]
            places.require_all(folder)
            fill = partial(read_into, found)
        else:
            fill = partial(_unpickle, places, folder, load_format)
    return torch.inference_mode()(fill)


def _unpickle(places: _Places, folder: Path, load_format: str, stop: threading.Event) -> None:
    for file in _pickled_files(folder, load_format):
        if stop.is_set():
            return
        for name, tensor in _read_pickled(file).items():
            if stop.is_set():
                return
            for slot in places.find(file, name, tuple(tensor.shape)):
                slot.fill(tensor[tuple(slice(s.begin, s.begin + s.count) for s in slot.region)])
    places.require_all(folder)


class _Places:
    """Where a model's weights go, and which of them a checkpoint has."""

    def __init__(self, model: Fillable, elsewhere: Iterable[str]) -> None:
        self._model = type(model).__name__
        self._unused = model.unused
        self._slots = model.slots()
        self._elsewhere = frozenset(elsewhere) - self._slots.keys()
        self._missing = dict.fromkeys(self._slots)

    def find(self, file: Path, name: str, shape: tuple[int, ...]) -> Sequence[Slot]:
        """A tensor's slots; none when it is not needed. Raises CheckpointError when it has no place or another shape."""
        known = _known_name(name, self._slots)
        if known is None:
            if name.endswith(_NOT_WEIGHTS) or name == "lm_head.weight":
                return ()
            if any(part in name for part in self._unused) or _known_name(name, self._elsewhere):
                return ()
            raise CheckpointError(
                f"{file} has a tensor {name} that {self._model} has no place for.{did_you_mean(name, self._slots)}"
            )
        slot = self._slots[known]
        if shape != slot.shape:
            raise CheckpointError(
                f"{file}: {name} has the shape {list(shape)}, and config.json asks for {list(slot.shape)}."
            )
        self._missing.pop(known, None)
        return slot.parts

    def require_all(self, folder: Path) -> None:
        """Raises CheckpointError when the checkpoint lacks a tensor."""
        missing = list(self._missing)
        if missing:
            shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
            raise CheckpointError(
                f"The checkpoint in {folder} lacks {len(missing)} of {len(self._slots)} tensors: {shown}. "
                f"Is a file of it missing?"
            )


def _fill_dummy(model: Fillable, seed: int, _stop: threading.Event) -> None:
    """Random weights, the same for the same seed on the same kind of device; norms stay as they are."""
    generator = torch.Generator(next(model.named_parameters())[1].device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and parameter.dtype not in _QUANTIZED:
            parameter.normal_(0.0, 0.02, generator=generator)
        elif name.endswith(".bias"):
            parameter.zero_()
    for part in (part for slot in model.slots().values() for part in slot.parts):
        if isinstance(part, QuantizedSlot):
            shape = tuple(share.count for share in part.region)
            weight = torch.empty(shape, device=part.target.device)
            part.fill(weight.normal_(0.0, 0.02, generator=generator))


def _weight_files(folder: Path, stem: str, suffix: str) -> list[Path]:
    """The files of a checkpoint in order: those its index names, else the one of the usual name, else all of
    the kind.
    """
    whole = folder / f"{stem}.{suffix}"
    index = folder / f"{whole.name}.index.json"
    if index.is_file():
        return _listed(index)
    return (
        [whole]
        if whole.is_file()
        else sorted(folder.glob(f"{stem if suffix == 'bin' else ''}*.{suffix}"))
    )


def _listed(index: Path) -> list[Path]:
    """The files that an index names, in order. Raises CheckpointError when one is elsewhere or not there."""
    folder = index.parent
    try:
        names: set[str] = set(json.loads(index.read_text())["weight_map"].values())
        outside = sorted(name for name in names if Path(name).name != name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}") from None
    if outside:
        raise CheckpointError(f"{index} names {outside[0]}, which is not in its own folder.")
    files = [folder / name for name in sorted(names)]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(
            f"{folder} lacks {len(absent)} of the {len(files)} files that {index.name} names: {', '.join(absent[:3])}."
        )
    return files


def _pickled_files(folder: Path, load_format: str) -> list[Path]:
    """Raises CheckpointError when there are none, or when they are not to be read."""
    files = _weight_files(folder, "pytorch_model", "bin")
    if load_format == "safetensors" or not files:
        hint = " (it has pytorch_model.bin: --load-format auto reads that)" if files else ""
        raise CheckpointError(f"{folder} has no weights: no *.safetensors file{hint}.")
    return files


def _read_pickled(file: Path) -> dict[str, torch.Tensor]:
    try:
        # Files from before PyTorch 1.6 are no zip archives, and cannot be memory-mapped.
        tensors = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    except (
        Exception
    ) as error:  # torch and pickle raise many kinds for bytes that are not what they should be
        text = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{file} cannot be read as plain tensors ({text}). It is cut short, or holds code, which tk does not run; "
            f"convert it to safetensors."
        ) from None
    if not isinstance(tensors, dict) or not all(
        isinstance(t, torch.Tensor) for t in tensors.values()
    ):
        raise CheckpointError(f"{file} holds something else than tensors by their names.")
    return tensors


def _known_name(name: str, slots: Collection[str]) -> str | None:
    """Which of the slots a checkpoint's name is for; the base model's prefix may be there or not, and old files of BERT call a
    norm's weight and bias by their Greek letters.
    """
    if name.endswith((".gamma", ".beta")):
        name = name.replace(".gamma", ".weight").replace(".beta", ".bias")
    if name in slots:
        return name
    for prefix in _PREFIXES:
        if prefix + name in slots:
            return prefix + name
    return None
