"""Files and models that examples name, and changes that make examples quick."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import trustme
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from tests.checkpoints import edit_json
from tests.server import Server
from tests.speech.invented import TOKENS, FakeModel, Heard, spelled
from tests.speech.served import Served, serving, wav
from toolkit.demo import MODEL_DIR

QUESTION = "What is a KV cache?"
TRACE = [{"timestamp": 50 * i, "input_length": 16 + i, "output_length": 4} for i in range(5)]
QUICK = {
    "--duration 10": "--duration 0.4",
    "--num-prompts 64": "--num-prompts 8",
    "--num-prompts 20": "--num-prompts 6",
    "--num-prompts 12": "--num-prompts 4",
    "--num-prompts 8": "--num-prompts 4",
    "rps=2,4": "rps=32,64",
    "--rps 5 ": "--rps 25 ",
    "--request-rate 5 ": "--request-rate 25 ",
    "0.0.0.0": "127.0.0.1",
}
"""Replacements for slow flags, and for addresses that other machines could reach."""
INVALID_MEASUREMENTS = ("SATURATED", "No request arrived")
"""Messages of measurements that a slow machine may invalidate."""


def save_model(folder: Path) -> None:
    """Write the demo model with gpt2's context of 1024 tokens."""
    shutil.copytree(MODEL_DIR, folder)
    weights = load_file(folder / "model.safetensors")
    [positions] = [name for name in weights if name.endswith("wpe.weight")]
    weights[positions] = pad(weights[positions], (0, 0, 0, 1024 - len(weights[positions])))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", n_positions=1024)
    edit_json(folder / "tokenizer_config.json", model_max_length=1024)


def write_files(folder: Path) -> None:
    """Write the files that examples read."""
    (folder / "notes.txt").write_text(QUESTION)
    (folder / "keys.txt").write_text("a-key")
    (folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in TRACE))


def write_sound(folder: Path) -> None:
    """Write the sound files that examples read."""
    for name in ("talk", "call"):
        (folder / f"{name}.wav").write_bytes(wav(2.0))


@contextmanager
def hearing_server() -> Iterator[SimpleNamespace]:
    """Serve an invented model under the name of a real one, which hears the same in all files."""

    def reply(heard: Heard) -> tuple[list[int], float]:
        has_times = heard.prompt[-1] != TOKENS.no_timestamps
        return spelled(0.0, " The sea is calm.", 1.5) if has_times else spelled(" Hello."), -0.25

    served = Served(FakeModel(reply), name="openai/whisper-tiny")
    try:
        with serving(served) as url:
            yield SimpleNamespace(url=url)
    finally:
        served.close()


def write_certificate(folder: Path) -> None:
    """Write `key.pem` and `cert.pem` of this machine."""
    identity = trustme.CA().issue_cert("localhost")
    identity.private_key_pem.write_to_path(folder / "key.pem")
    identity.cert_chain_pems[0].write_to_path(folder / "cert.pem")


def shortened(line: str) -> str:
    """Return the quick version of an example."""
    for long, short in QUICK.items():
        line = line.replace(long, short)
    return line


def directed(line: str, server: Server | SimpleNamespace) -> str:
    """Return the quick version of an example, with the address of a running server."""
    return (
        shortened(line)
        .replace("http://127.0.0.1:8000", server.url)
        .replace("127.0.0.1:8000", server.url)
    )


def is_invalid_measurement(done: subprocess.CompletedProcess[str]) -> bool:
    output = done.stdout + done.stderr
    return done.returncode == 1 and any(reason in output for reason in INVALID_MEASUREMENTS)
