"""The recorded outputs of Transformers are those of the pinned version."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests import checkpoints
from tests.models.conftest import Case
from tests.references import records

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def test_records_are_of_the_pinned_transformers():
    [pinned] = re.findall(r"(?m)^transformers==(\S+)", CONSTRAINTS.read_text())
    assert records().version == pinned, "run `make references`, and look at what changed"


def test_a_recorded_model_is_what_transformers_saves_and_computes(tmp_path):
    case = Case("qwen3", tmp_path)
    recorded = case.model
    tensors = load_file(checkpoints.save(recorded, tmp_path / "ours") / "model.safetensors")
    prompt, last = case.prompts[3], slice(-4, None)
    expected = recorded.greedy(prompt, 16), recorded.logits(prompt, last)
    model = checkpoints.make_reference("qwen3").module
    model.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert tensors.keys() == theirs.keys()
    assert all(torch.equal(tensors[name], theirs[name]) for name in theirs)
    assert checkpoints.greedy(model, prompt, 16) == expected[0]
    torch.testing.assert_close(checkpoints.logits(model, prompt)[last], expected[1])
