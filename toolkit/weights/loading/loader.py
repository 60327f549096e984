"""Load a checkpoint's weights into a model, without a second copy in memory."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from toolkit.ctranslate2.file import is_ctranslate2
from toolkit.errors import CheckpointError, did_you_mean
from toolkit.files import read_json
from toolkit.gguf.folder import is_gguf
from toolkit.weights.formats import ctranslate2
from toolkit.weights.gguf import reader as gguf
from toolkit.weights.loading.collected import CollectedSlot
from toolkit.weights.loading.safetensors import StoredTensor, read_header, read_into
from toolkit.weights.names import text_name
from toolkit.weights.slots import Slot, Slots
from toolkit.weights.weight import DUMMY_STD, Stored

_PREFIXES = ("transformer.", "model.", "gpt_neox.", "bert.", "roberta.")
_NOT_WEIGHTS = (
    ".k_scale",
    ".v_scale",
    *(
        f".{attention}.{mask}"
        for attention in ("attn", "attention")
        for mask in ("bias", "masked_bias")
    ),
    "rotary_emb.inv_freq",
)
"""Buffers in old checkpoints, and scales for a cache in FP8: tk computes its own."""
_HEAD, _NEOX_HEAD = "lm_head.", "embed_out."


class Loadable(Protocol):
    """A module that weights can be loaded into."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Substrings of checkpoint tensor names to ignore."""
        ...

    def slots(self) -> Slots: ...

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...


@runtime_checkable
class Renames(Protocol):
    """A model whose slots depend on the names in the checkpoint."""

    def slots_for(self, tensors: Mapping[str, tuple[int, ...]]) -> Slots:
        """Return the slots of a checkpoint's tensors (shapes by name), and of those it lacks."""


@runtime_checkable
class Arranges(Protocol):
    """A layer whose weights have another order in checkpoints."""

    def arrange(self) -> None:
        """Put the weights in the order of the kernels, in place. Called once, after loading."""


def load_weights(
    model: Loadable, folder: Path, load_format: str, seed: int = 0, elsewhere: Iterable[str] = ()
) -> None:
    """Load the weights. Parameters and errors are those of `find_weights`."""
    find_weights(model, folder, load_format, seed, elsewhere)(threading.Event())


def find_weights(
    model: Loadable, folder: Path, load_format: str, seed: int = 0, elsewhere: Iterable[str] = ()
) -> Callable[[threading.Event], None]:
    """Return a function that loads the weights, on any thread, and ends early if its event is set.

    `elsewhere`: names of tensors that another stage of the model needs. Raises CheckpointError
    with the file and the tensor that are wrong, missing or cut short: at once if the file headers
    show it, else while loading."""
    fill: Callable[[threading.Event], None]
    if load_format == "dummy":
        fill = partial(_fill_dummy, model, seed)
    else:
        tensors = stored_tensors(folder)
        if tensors:
            table = _SlotTable(model, {one.name: one.shape for one in tensors}, elsewhere)
            found = [
                (part, part.slot_for(slot))
                for tensor in tensors
                for slot in table.find(tensor.file, tensor.name, tensor.shape)
                for part in (tensor.part(slot.region),)
            ]
            table.require_all(folder)
            for tensor, slot in found:
                if not slot.accepts(tensor.dtype):
                    raise CheckpointError(
                        f"{tensor.file}: {tensor.name} has the type {tensor.kind}, which is not "
                        f"what config.json describes: {slot.wanted}."
                    )
                slot.announce()
            fill = partial(read_into, found)
        else:
            fill = partial(_unpickle, model, elsewhere, folder, load_format)

    def load(stop: threading.Event) -> None:
        fill(stop)
        for module in model.modules() if isinstance(model, torch.nn.Module) else ():
            if isinstance(module, Arranges):
                module.arrange()

    return torch.inference_mode()(load)


def _unpickle(
    model: Loadable,
    elsewhere: Iterable[str],
    folder: Path,
    load_format: str,
    stop: threading.Event,
) -> None:
    files = _pickled_files(folder, load_format)
    parts = (part for slot in model.slots().values() for part in slot.parts)
    if any(isinstance(part, CollectedSlot) for part in parts):
        raise CheckpointError(f"{folder} is quantized: tk reads that from safetensors files only.")
    shapes = {name: tuple(t.shape) for file in files for name, t in _read_pickled(file).items()}
    table = _SlotTable(model, shapes, elsewhere)
    for file in files:
        if stop.is_set():
            return
        for name, tensor in _read_pickled(file).items():
            if stop.is_set():
                return
            for slot in table.find(file, name, tuple(tensor.shape)):
                slot.fill(tensor[tuple(slice(s.begin, s.begin + s.count) for s in slot.region)])
    table.require_all(folder)


class _SlotTable:
    """A model's slots by tensor name. Tracks the tensors that are still missing."""

    def __init__(
        self,
        model: Loadable,
        tensors: Mapping[str, tuple[int, ...]],
        elsewhere: Iterable[str],
    ) -> None:
        """`tensors`: the checkpoint's, shapes by name. `elsewhere`: as in `find_weights`."""
        self._model = getattr(model, "architecture", type(model).__name__)
        self._unused = model.unused
        self._slots = model.slots_for(tensors) if isinstance(model, Renames) else model.slots()
        self._elsewhere = frozenset(elsewhere) - self._slots.keys()
        self._has_head = any(map(_is_head, (*self._slots, *self._elsewhere)))
        self._missing = {name: None for name, slot in self._slots.items() if not slot.is_optional}

    def find(self, file: Path, name: str, shape: tuple[int, ...]) -> Sequence[Slot]:
        """Return a tensor's slots; none if it is not needed.

        Raises CheckpointError if the model has no such tensor, or one of another shape."""
        known = _known_name(name, self._slots)
        if known is None:
            is_copy = _is_head(name) and not self._has_head and not name.endswith(".bias")
            if name.endswith(_NOT_WEIGHTS) or is_copy:  # of tied embeddings
                return ()
            if any(part in name for part in self._unused) or _known_name(name, self._elsewhere):
                return ()
            raise CheckpointError(
                f"{file} has a tensor {name} that {self._model} does not have."
                f"{did_you_mean(name, self._slots)}"
            )
        slot = self._slots[known]
        if slot.shape is not None and shape != slot.shape:
            raise CheckpointError(
                f"{file}: {name} has the shape {list(shape)}; config.json requires "
                f"{list(slot.shape)}."
            )
        self._missing.pop(known, None)
        return slot.parts

    def require_all(self, folder: Path) -> None:
        """Raise CheckpointError if the checkpoint lacks a tensor."""
        missing = list(self._missing)
        if missing:
            shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
            raise CheckpointError(
                f"The checkpoint in {folder} lacks {len(missing)} of {len(self._slots)} tensors: "
                f"{shown}. Check whether a file is missing."
            )


def _fill_dummy(model: Loadable, seed: int, _stop: threading.Event) -> None:
    """Fill with random weights, reproducible per device type. Norms keep their values."""
    generator = torch.Generator(next(model.named_parameters())[1].device).manual_seed(seed)
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    weights = [module for module in modules if isinstance(module, Stored)]
    in_weights = {id(parameter) for weight in weights for parameter in weight.parameters()}
    for weight in weights:
        weight.fill_randomly(generator)
    for name, parameter in model.named_parameters():
        if id(parameter) in in_weights:
            continue
        if parameter.dim() > 1:
            parameter.normal_(0.0, DUMMY_STD, generator=generator)
        elif name.endswith(".bias"):
            parameter.zero_()


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """Return the tensors of a checkpoint's safetensors, GGUF or CTranslate2's files.

    None of them if it has others."""
    if is_gguf(folder):
        return gguf.read_header(folder)
    if is_ctranslate2(folder):
        return ctranslate2.read_header(folder)
    files = _weight_files(folder, "model", "safetensors")
    found = [tensor for file in files for tensor in read_header(file)]
    return [replace(one, name=text_name(one.name)) for one in found]


def tensor_names(folder: Path, load_format: str) -> set[str]:
    """Return the names of a checkpoint's tensors. Raises CheckpointError if it has no weights."""
    if stored := stored_tensors(folder):
        return {tensor.name for tensor in stored}
    files = _pickled_files(folder, load_format)
    return {name for file in files for name in _read_pickled(file)}


def _weight_files(folder: Path, stem: str, suffix: str) -> list[Path]:
    """Return a checkpoint's files: those in its index, else `stem.suffix`, else all of the kind."""
    single = folder / f"{stem}.{suffix}"
    index = folder / f"{single.name}.index.json"
    if index.is_file():
        return _indexed_files(index)
    return (
        [single]
        if single.is_file()
        else sorted(
            file
            for file in folder.glob(f"{stem if suffix == 'bin' else ''}*.{suffix}")
            if file.is_file()
        )
    )


def _indexed_files(index: Path) -> list[Path]:
    """Return an index's files, sorted. Raises CheckpointError if one is missing or outside."""
    folder = index.parent
    try:
        names: set[str] = set(read_json(index)["weight_map"].values())
        outside = sorted(name for name in names if Path(name).name != name)
        absent = sorted(name for name in names if not (folder / name).is_file())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}") from None
    if outside:
        raise CheckpointError(f"{index} lists {outside[0]}, which is outside its folder.")
    if absent:
        raise CheckpointError(
            f"{folder} lacks {len(absent)} of the {len(names)} files that {index.name} lists: "
            f"{', '.join(absent[:3])}."
        )
    return [folder / name for name in sorted(names)]


def _pickled_files(folder: Path, load_format: str) -> list[Path]:
    """Return the .bin files. Raises CheckpointError if there are none, or if not allowed."""
    files = _weight_files(folder, "pytorch_model", "bin")
    if load_format == "safetensors" or not files:
        hint = " (it has pytorch_model.bin; --load-format auto reads it)" if files else ""
        raise CheckpointError(f"{folder} has no weights: no *.safetensors file{hint}.")
    return files


def _read_pickled(file: Path) -> dict[str, torch.Tensor]:
    try:
        # Files from before PyTorch 1.6 are not zip archives and cannot be memory-mapped.
        is_zip = zipfile.is_zipfile(file)
        if is_zip and any(one.compress_type for one in zipfile.ZipFile(file).infolist()):
            raise ValueError("it is compressed, which PyTorch's files are not")
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # torch and pickle raise many types for invalid bytes
        text = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{file} cannot be read as plain tensors ({text}). It is cut short, or contains code, "
            f"which tk does not run. Convert it to safetensors."
        ) from None
    if not isinstance(tensors, dict) or not all(
        isinstance(t, torch.Tensor) for t in tensors.values()
    ):
        raise CheckpointError(f"{file} is not a dictionary of tensors by name.")
    return {text_name(name): tensor for name, tensor in tensors.items()}


def _known_name(name: str, slots: Collection[str]) -> str | None:
    """Return the slot's name for a checkpoint's tensor name, or None.

    The base model's prefix may be missing. Old BERT checkpoints call a norm's weight and bias
    gamma and beta, and GPT-NeoX calls the head embed_out."""
    if name in slots:
        return name
    if name.startswith(_NEOX_HEAD):
        name = _HEAD + name.removeprefix(_NEOX_HEAD)
    if name.endswith((".gamma", ".beta")):
        name = name.replace(".gamma", ".weight").replace(".beta", ".bias")
    if name in slots:
        return name
    for prefix in _PREFIXES:
        if prefix + name in slots:
            return prefix + name
    return None


def _is_head(name: str) -> bool:
    return name.startswith((_HEAD, _NEOX_HEAD))
