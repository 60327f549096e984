"""Names of GGUF models: a repository on the hub and a quantization, as in org/model:Q4_K_M."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from toolkit.errors import CheckpointError
from toolkit.gguf.file import split_names

_QUANTIZATION = re.compile(
    r"(?<![a-z0-9])((?:ud-)?(?:i?q\d\w*|tq\d_\d|mxfp4\w*|nvfp4|b?f16|f32))(?![a-z0-9_])",
    re.IGNORECASE,
)
_SPLIT_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")
_NOT_MODELS = ("mmproj", "imatrix")


def split_name(name: str) -> tuple[str, str | None]:
    """Return (repository, quantization or None) of a name on the hub. `latest` is none."""
    repository, _, quantization = name.partition(":")
    return repository, None if quantization in ("", "latest") else quantization


def models_in(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the GGUF models among files: all files of each, by its first.

    Vision projectors and importance matrices are not models."""
    found = {}
    for name in sorted(names):
        base = PurePosixPath(name).name.lower()
        if base.endswith(".gguf") and not any(word in base for word in _NOT_MODELS):
            files = split_names(name)
            if files[0] == name:
                found[name] = files
    return found


def quantization_of(file: str) -> str:
    """Return the quantization that a file's name says, else the name without its suffix."""
    stem = _SPLIT_NUMBER.sub("", PurePosixPath(file).name[: -len(".gguf")])
    matches = _QUANTIZATION.findall(stem)
    return matches[-1].upper() if matches else stem


def labels(models: Iterable[str]) -> dict[str, str]:
    """Return what to write after the colon for each model: its quantization if that is unique."""
    short = {model: quantization_of(model) for model in models}
    return {
        model: label
        if list(short.values()).count(label) == 1
        else PurePosixPath(model).name[: -len(".gguf")]
        for model, label in short.items()
    }


def choose(names: Iterable[str], quantization: str | None, where: str) -> str:
    """Return the first file of a model by its quantization, or by its file's name.

    `where`: the repository or folder, for messages. Raises CheckpointError, with a list of what
    there is, if none or several match."""
    named = labels(models_in(names))
    listed = ", ".join(f"{where}:{label}" for label in named.values()) or "no GGUF file"
    if quantization is None:
        if len(named) == 1:
            return next(iter(named))
        raise CheckpointError(f"{where} has several GGUF models. Name one of them: {listed}.")
    wanted = quantization.lower().removesuffix(".gguf")
    is_part = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9_])")
    exact = [file for file, label in named.items() if label.lower() == wanted]
    found = exact or [file for file in named if is_part.search(file.lower())]
    if len(found) == 1:
        return found[0]
    problem = "several GGUF models that match" if found else "no GGUF model"
    raise CheckpointError(f"{where} has {problem} {quantization}. It has: {listed}.")
