"""Builds a model and fills it from a checkpoint's files, tensor by tensor, without holding a second copy."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import CheckpointError, did_you_mean
from toolkit.layers import Slots
from toolkit.models.registry import SUPPORTED, CausalLM, resolve_architecture

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAPPED_AT_ONCE = 2**24
"""Bytes of a file that are read before it is mapped anew."""
_PREFIXES = ("transformer.", "model.")
_NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")
"""Buffers that old checkpoints carry along."""


def load_config(folder: Path) -> Any:
    """The model's Transformers config. Raises CheckpointError when it cannot be read or is of an unsupported
    kind.
    """
    try:
        raw = json.loads((folder / "config.json").read_text())
        if not isinstance(raw, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be read: {error}") from None
    if not set(raw.get("architectures") or []) & set(SUPPORTED):
        resolve_architecture(_Named(raw.get("architectures"), raw.get("model_type")), str(folder))

    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as error:  # Transformers raises many kinds for a bad config; all mean the same here
        text = " ".join(str(error).split())
        raise CheckpointError(f"{folder / 'config.json'} cannot be used: {text}") from None


class _Named:
    def __init__(self, architectures: Any, model_type: Any) -> None:
        self.architectures, self.model_type = architectures, model_type


def choose_dtype(wanted: str, config: Any, device: torch.device) -> torch.dtype:
    """auto: float32 on a CPU; on a GPU the checkpoint's own 16-bit type, or bfloat16 when it has none."""
    if wanted != "auto":
        return DTYPES[wanted]
    if device.type == "cpu":
        return torch.float32
    saved = getattr(config, "dtype", None)
    return saved if saved in (torch.bfloat16, torch.float16) else torch.bfloat16


def build_model(
    config: Any, folder: Path, *, device: torch.device, dtype: torch.dtype, max_model_len: int
) -> CausalLM:
    """The model with its parameters made and not filled."""
    with device, _default_dtype(dtype), torch.inference_mode():
        model = resolve_architecture(config, str(folder))(config, max_model_len)
    return model.eval()


def load_weights(model: CausalLM, folder: Path, load_format: str, seed: int = 0) -> None:
    """Fills the model. Raises CheckpointError naming the file and the tensor that are wrong, missing or cut
    short.
    """
    with torch.inference_mode():
        if load_format == "dummy":
            fill_dummy(model, seed)
            return
        slots = model.slots()
        filled: set[str] = set()
        for file, name, tensor in read_tensors(folder, load_format):
            known = _known_name(name, slots)
            if known is None:
                if not name.endswith(_NOT_WEIGHTS) and name != "lm_head.weight":
                    raise CheckpointError(
                        f"{file} has a tensor {name} that {type(model).__name__} has no place for."
                        f"{did_you_mean(name, slots)}"
                    )
                continue
            slot = slots[known]
            if tuple(tensor.shape) != slot.shape:
                raise CheckpointError(
                    f"{file}: {name} has the shape {list(tensor.shape)}, and config.json asks for {list(slot.shape)}."
                )
            slot.fill(tensor)
            filled.add(known)
    missing = [name for name in slots if name not in filled]
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise CheckpointError(
            f"The checkpoint in {folder} lacks {len(missing)} of {len(slots)} tensors: {shown}. Is a file of it missing?"
        )


def fill_dummy(model: CausalLM, seed: int) -> None:
    """Random weights, the same for the same seed on the same kind of device; norms stay as they are."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.02, generator=generator)
        elif name.endswith(".bias"):
            parameter.zero_()


def read_tensors(folder: Path, load_format: str) -> Iterator[tuple[Path, str, torch.Tensor]]:
    """(file, name, tensor) of the whole checkpoint, one tensor in memory at a time (files are memory-mapped)."""
    files = _weight_files(folder, "model", "safetensors")
    if files:
        for file in files:
            yield from _read_safetensors(file)
        return
    pickled = _weight_files(folder, "pytorch_model", "bin")
    if load_format == "safetensors" or not pickled:
        hint = " (it has pytorch_model.bin: --load-format auto reads that)" if pickled else ""
        raise CheckpointError(f"{folder} has no weights: no *.safetensors file{hint}.")
    for file in pickled:
        yield from _read_pickled(file)


def _weight_files(folder: Path, stem: str, suffix: str) -> list[Path]:
    """The files of a checkpoint in order: those its index names, else the one of the usual name, else all of
    the kind.
    """
    whole = folder / f"{stem}.{suffix}"
    index = folder / f"{whole.name}.index.json"
    if index.is_file():
        return _listed(index)
    return [whole] if whole.is_file() else sorted(folder.glob(f"{stem if suffix == 'bin' else ''}*.{suffix}"))


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


def _read_safetensors(file: Path) -> Iterator[tuple[Path, str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            names = list(handle.keys())
        while names:
            # Opened anew every so often: what was read of a mapped file counts as this process's memory.
            with safe_open(file, framework="pt", device="cpu") as handle:
                size = 0
                while names and size < MAPPED_AT_ONCE:
                    name = names.pop(0)
                    tensor = handle.get_tensor(name)
                    size += tensor.nbytes
                    yield file, name, tensor
                    del tensor
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} {_what_is_wrong(file)} ({error}). Fetch or copy it again.") from None


def _what_is_wrong(file: Path) -> str:
    """A safetensors file begins with its header's length and names its last byte: tell a short file from a
    wrong one.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (header_size,) = struct.unpack("<Q", stream.read(8))
            if header_size > size:
                return f"is cut short or no safetensors file: it has {size} bytes"
            header = json.loads(stream.read(header_size))
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        expected = 8 + header_size + end
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        return "is no valid safetensors file: its header cannot be read"
    if size < expected:
        return f"is cut short: it has {size} bytes of {expected}"
    return "is no valid safetensors file"


def _read_pickled(file: Path) -> Iterator[tuple[Path, str, torch.Tensor]]:
    try:
        # Files from before PyTorch 1.6 are no zip archives, and cannot be memory-mapped.
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # torch and pickle raise many kinds for bytes that are not what they should be
        text = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{file} cannot be read as plain tensors ({text}). It is cut short, or holds code, which tk does not run; "
            f"convert it to safetensors."
        ) from None
    if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise CheckpointError(f"{file} holds something else than tensors by their names.")
    for name, tensor in tensors.items():
        yield file, name, tensor


def _known_name(name: str, slots: Slots) -> str | None:
    """The slot for a checkpoint's name; the base model's prefix may be there or not."""
    if name in slots:
        return name
    for prefix in _PREFIXES:
        if prefix + name in slots:
            return prefix + name
    return None


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
