"""Checkpoints of models that only tests describe."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests import checkpoints
from toolkit.inventory.checkpoint import read_folder
from toolkit.models.architectures import llama
from toolkit.models.config import registry
from toolkit.models.describe import Decoder

NAME = "own"  # its type in config.json


def make_checkpoint(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    describe: Callable[[llama.Config], Decoder],
    *,
    gain: float = 1.0,
    **config: object,
) -> Path:
    """Write random weights of a model, and register it.

    `gain`: of the products, 1 keeps the size of what they read. `config`: fields of config.json."""
    module = types.SimpleNamespace(
        ARCHITECTURES=("OwnForCausalLM",), Config=llama.Config, describe=describe
    )
    find = registry._module
    monkeypatch.setattr(registry, "_module", lambda kind: module if kind == NAME else find(kind))
    monkeypatch.setattr(registry, "model_types", lambda: (NAME,))
    checkpoints.save(checkpoints.make_reference("llama3-gqa"), folder)
    checkpoints.edit_json(
        folder / "config.json",
        architectures=["OwnForCausalLM"],
        model_type=NAME,
        intermediate_size=96,
        tie_word_embeddings=False,
        **config,
    )
    generator = torch.Generator().manual_seed(0)
    weights = {
        one.name: torch.randn(one.shape, generator=generator)
        * (1.0 if len(one.shape) == 1 else gain * one.columns**-0.5)
        for one in read_folder(folder, NAME).description.parameters()
    }
    save_file(weights, folder / "model.safetensors")
    return folder
