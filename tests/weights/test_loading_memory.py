"""Loading needs memory for one copy of the weights, not two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoints import edit_json

SCRIPT = """
import os, re, sys
from pathlib import Path
from toolkit import LLM

def resident(kind):
    return int(re.search(kind + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def load(folder):
    return LLM(
        folder, device="cpu", num_threads=1, max_num_seqs=2, max_model_len=16,
        num_gpu_blocks_override=1,
    )

load(sys.argv[1])                                # import everything now
for folder in sys.argv[2:]:
    if os.fork() == 0:
        load(sys.argv[1])                                # map the libraries' pages
        Path("/proc/self/clear_refs").write_text("5")    # reset the peak
        before = resident("VmRSS")
        llm = load(folder)
        print((resident("VmHWM") - before) / llm.info.weight_bytes, llm.info.weight_bytes)
        break
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Return folders of one architecture: (small, 100 MB, the same in shards)."""

    import transformers

    root = tmp_path_factory.mktemp("memory")
    shape = {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 262,
        "max_position_embeddings": 64,
    }
    small = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, **shape
    )
    large = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, **shape
    )
    with torch.device("meta"):
        sketches = transformers.LlamaForCausalLM(small), transformers.LlamaForCausalLM(large)
    models = [sketch.to_empty(device="cpu") for sketch in sketches]
    for model in models:
        for parameter in model.parameters():
            parameter.data.fill_(0.01)
    models[0].save_pretrained(root / "small")
    models[1].save_pretrained(root / "large")
    models[1].save_pretrained(root / "shards", max_shard_size="30MB")
    return root / "small", root / "large", root / "shards"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_peak_memory_is_close_to_the_weights(folders):
    """In one file and in shards, each in a process that has loaded no other large model."""
    small, *others = map(str, folders)
    command = [sys.executable, "-c", SCRIPT, small, *others]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(others)
    for line in done.stdout.splitlines():
        share, size = map(float, line.split())
        assert size > 100e6
        assert 0.9 < share < 1.35


def test_weights_that_do_not_fit_are_refused_before_reading(folders, tmp_path):
    """A model of 200 TB; building it on the meta device takes no memory."""
    (tmp_path / "huge").mkdir()
    (tmp_path / "huge" / "config.json").write_text((folders[0] / "config.json").read_text())
    edit_json(tmp_path / "huge" / "config.json", hidden_size=2**20, intermediate_size=2**23)
    assert json.loads((tmp_path / "huge" / "config.json").read_text())["hidden_size"] == 2**20
    from toolkit import LLM
    from toolkit.errors import OutOfMemoryError

    with pytest.raises(
        OutOfMemoryError, match=r"The model's weights take [\d.]+ GiB in float32"
    ) as caught:
        LLM(str(tmp_path / "huge"), device="cpu")
    assert "--dtype bfloat16" in caught.value.message
