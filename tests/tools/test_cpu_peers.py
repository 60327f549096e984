"""Comparison of CPU engines: agreement of their answers, the engine processes, the converters."""

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


def test_agreement_ends_at_the_first_different_token() -> None:
    ours = [[1, 2, 3, 4], [5, 6]]
    assert agreement(ours, ours) == 1.0
    assert agreement(ours, [[1, 9, 3, 4], [5, 6]]) == (0.25 + 1.0) / 2
    assert agreement(ours, [[9, 2, 3, 4], [0, 6]]) == 0.0


def test_engine_process_answers_over_its_pipe_and_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake engine repeats the prompt's last token. After a prompt of one token it returns too
    few. It also prints to stdout, which must not disturb the answers.
    """
    peer = tmp_path / "peer.py"
    peer.write_text(
        f"""
import atexit, os, sys, time
sys.path.insert(0, {str(Path(cpu_peers.__file__).parents[2])!r})
from tools.bench import cpu_peers
def echo(folder, dtype, threads):
    if dtype == "no exit":
        atexit.register(time.sleep, 100)
    os.write(1, b"loading...\\n")
    return lambda prompts, lengths: [
        [p[-1]] * (n - (len(p) == 1)) for p, n in zip(prompts, lengths)
    ]
cpu_peers.ENGINES["echo"] = echo
cpu_peers.main()
"""
    )
    monkeypatch.setattr(versus_cpu.cpu_peers, "__file__", str(peer))
    engine = Engine(sys.executable, "echo", tmp_path, "float32", 1)
    assert engine.start_up >= 0
    seconds, tokens = engine.run(([[3, 4], [5, 6]], [2, 3]))
    assert (seconds >= 0, tokens) == (True, [[4, 4], [6, 6, 6]])
    # Suspended between its turns.
    until(lambda: [process.status() for process in engine.processes] == ["stopped"])
    with pytest.raises(SystemExit, match=r"returned \[1\] tokens instead of \[2\]"):
        engine.run(([[3]], [2]))
    engine.close()
    monkeypatch.setattr(versus_cpu, "EXIT_TIMEOUT", 0.5)
    engine = Engine(sys.executable, "echo", tmp_path, "no exit", 1)
    engine.close()
    assert engine._process.returncode == -signal.SIGKILL, "killed: it does not exit"


def test_safetensors_reader_reads_transformers_files(checkpoint) -> None:
    file = checkpoint("gpt2") / "model.safetensors"
    ours, theirs = cpu_gguf.read(file), load_file(file)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(torch.from_numpy(ours[name]), tensor), name


def test_every_gpt2_weight_has_a_gguf_name(checkpoint) -> None:
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
