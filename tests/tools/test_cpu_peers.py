"""The comparison of engines on a CPU: how their answers are held against each other, and what the converters make."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.server import until
from tools.bench import cpu_gguf, cpu_peers, versus_cpu
from tools.bench.versus_cpu import Engine, agreement


def test_agreement_ends_at_the_first_token_that_is_another() -> None:
    ours = [[1, 2, 3, 4], [5, 6]]
    assert agreement(ours, ours) == 1.0
    assert agreement(ours, [[1, 9, 3, 4], [5, 6]]) == (0.25 + 1.0) / 2
    assert agreement(ours, [[9, 2, 3, 4], [0, 6]]) == 0.0


def test_an_engine_answers_over_its_pipe_whatever_it_prints_and_is_held_to_the_number_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that repeats the prompt's last token, and of a prompt of one token makes too few."""
    peer = tmp_path / "peer.py"
    peer.write_text(
        f"""
import atexit, os, sys, time
sys.path.insert(0, {str(Path(cpu_peers.__file__).parents[2])!r})
from tools.bench import cpu_peers
def echo(folder, dtype, threads):
    if dtype == "for ever":
        atexit.register(time.sleep, 100)
    os.write(1, b"loading...\\n")
    return lambda prompts, lengths: [[p[-1]] * (n - (len(p) == 1)) for p, n in zip(prompts, lengths)]
cpu_peers.ENGINES["echo"] = echo
cpu_peers.main()
"""
    )
    monkeypatch.setattr(versus_cpu.cpu_peers, "__file__", str(peer))
    engine = Engine(sys.executable, "echo", tmp_path, "float32", 1)
    assert engine.start_up >= 0
    seconds, tokens = engine.run(([[3, 4], [5, 6]], [2, 3]))
    assert (seconds >= 0, tokens) == (True, [[4, 4], [6, 6, 6]])
    until(
        lambda: [process.status() for process in engine.processes] == ["stopped"]
    )  # others have their turns
    with pytest.raises(SystemExit, match=r"asked for \[2\] tokens and made \[1\]"):
        engine.run(([[3]], [2]))
    engine.close()
    monkeypatch.setattr(versus_cpu, "ENDING", 0.5)
    engine = Engine(sys.executable, "echo", tmp_path, "for ever", 1)
    engine.close()
    assert engine._process.returncode == -signal.SIGKILL, "one that does not end by itself"


def test_the_reader_of_safetensors_reads_what_transformers_wrote(checkpoint) -> None:
    file = checkpoint("gpt2") / "model.safetensors"
    ours, theirs = cpu_gguf.read(file), load_file(file)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(torch.from_numpy(ours[name]), tensor), name


def test_every_weight_of_gpt2_has_its_name_in_gguf(checkpoint) -> None:
    """https://github.com/ggml-org/llama.cpp: llm_tensor_names, LLM_ARCH_GPT2"""
    names = {
        name: cpu_gguf.gguf_name(name)
        for name in cpu_gguf.read(checkpoint("gpt2") / "model.safetensors")
    }
    assert None not in names.values()
    assert len(set(names.values())) == len(names) == 4 + 2 * 12
    assert names["transformer.h.1.mlp.c_proj.bias"] == "blk.1.ffn_down.bias"
    assert names["transformer.h.0.ln_2.weight"] == "blk.0.ffn_norm.weight"
    assert cpu_gguf.gguf_name("transformer.h.0.attn.masked_bias") is None
