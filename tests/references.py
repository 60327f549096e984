"""Transformers' outputs for the tests' tiny random models, recorded in files.

`make references` computes them with Transformers and writes them; tests read them, and import no
Transformers. A model is given by its recipe: class, fields of its config, seed. Its weights are
random numbers that follow from the tensors' names, so that only their names, shapes and spread are
recorded, as `save_pretrained` wrote them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parent / "references"
PARTS = FOLDER / "parts"  # what each process recorded
IS_RECORDING = os.environ.get("REFERENCES") == "write"
NEAR = 1e-4
"""Least distance of a greedy token's logit from the next: ours are as exact on any machine."""
_ATTENTION = {"attn_implementation": "eager"}  # SDPA ignores Gemma 2's soft cap

Change = Callable[[torch.nn.Module], object]


class Records:
    """The recorded files: models and answers (JSON), and logits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, dict[str, Any]] = {}
        self.logits: dict[str, torch.Tensor] = {}
        self.version = ""
        if (folder / "models.json").exists():
            content = json.loads((folder / "models.json").read_text())
            self.version, self.models = content["transformers"], content["models"]
            self.answers = json.loads((folder / "answers.json").read_text())
            self.logits = load_file(folder / "logits.safetensors")

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"transformers": self.version, "models": self.models}
        for name, value in (("models.json", content), ("answers.json", self.answers)):
            (self.folder / name).write_text(_one_line_per_entry(value) + "\n")
        save_file(dict(sorted(self.logits.items())), self.folder / "logits.safetensors")

    def add(self, other: Records) -> None:
        self.version = other.version or self.version
        self.models |= other.models
        self.logits |= other.logits
        for model, answers in other.answers.items():
            known = self.answers.setdefault(model, {})
            for query, tokens in answers.items():
                known[query] = max(known.get(query, []), tokens, key=len)


@functools.cache
def records() -> Records:
    """Return what this process records, or else what is recorded."""
    return Records(PARTS / str(os.getpid()) if IS_RECORDING else FOLDER)


class Reference:
    """A model of Transformers with random weights, all of which show in the output.

    Tests that use more of it than `save`, `greedy`, `logits` and `prompts` import Transformers, and
    then all is computed: they may have changed the model."""

    def __init__(
        self, family: str, settings: dict[str, Any], seed: int = 0, change: Change | None = None
    ) -> None:
        self._family, self._seed, self._change = family, seed, change
        self._settings = copy.deepcopy(settings)  # Transformers changes those of rotations
        self._used: torch.nn.Module | None = None  # by a test
        name = "" if change is None else change.__name__
        self._layout_key = f"{family}-{_digest(settings)}"
        self.key = f"{self._layout_key}-{seed}{name and '-'}{name}"

    def changed(self, change: Change) -> Reference:
        """Return the same model, changed in place by a function, which its name identifies."""
        return Reference(self._family, self._settings, self._seed, change)

    @property
    def module(self) -> torch.nn.Module:
        """The model itself. Its attributes are this object's, too."""
        if self._used is None:
            self._used = self._load()
        return self._used

    @property
    def is_used(self) -> bool:
        """True if a test may have changed the model."""
        return self._used is not None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.module, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.module(*args, **options)

    def save(self, folder: Path) -> None:
        """Write config.json, generation_config.json and model.safetensors."""
        layout = self._layout()
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in layout["files"].items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
        save_file(self.tensors(), folder / "model.safetensors", {"format": "pt"})

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what `save` writes, by name."""
        layout = self._layout()["tensors"].items()
        return {name: _random_tensor(self._seed, name, *spread) for name, spread in layout}

    @property
    def config(self) -> Any:
        """Transformers' config."""
        if self._used is not None:
            return self._used.config
        from transformers import AutoConfig

        fields = dict(self._layout()["files"]["config.json"])
        return AutoConfig.for_model(fields.pop("model_type"), **fields)

    def num_parameters(self) -> int:
        return self._layout()["parameters"]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return `count` greedy tokens after a prompt: batch size 1, with cache, no end token."""
        if self._used is not None:
            return self._generate(self._used, prompt, count)
        known, query = self._answers(), _digest(list(prompt))
        if len(known.get(query, ())) < count:
            self._require_recording(f"an answer of {count} tokens")
            known[query] = self._greedy(self._loaded, prompt, count)
        return known[query][:count]

    def tokens(
        self, query: str, compute: Callable[[torch.nn.Module], list[int]], count: int
    ) -> list[int]:
        """Return `count` tokens that `compute` returns for the model, recorded as `query`."""
        known = self._answers()
        if len(known.get(query, ())) < count:
            self._require_recording(query)
            known[query] = compute(self._loaded)
        return known[query][:count]

    def prompts(self, lengths: Sequence[int], count: int, vocab: int) -> list[list[int]]:
        """Return random prompts whose `count` greedy tokens are clearly the likeliest."""
        if self._used is not None:
            return self._search_prompts(self._used, lengths, count, vocab)
        known, query = self._answers(), f"prompts {_digest([*lengths, count, vocab])}"
        if query not in known:
            self._require_recording("a set of prompts")
            known[query] = self._search_prompts(self._loaded, lengths, count, vocab)
        return known[query]

    def logits(self, tokens: Sequence[int], positions: slice = slice(None)) -> torch.Tensor:
        """Return the logits [positions, vocab] of one uncached forward."""
        return self._tensor("logits", tokens, lambda logits: logits[positions], str(positions))

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first, in one uncached forward."""

        def chosen(logits: torch.Tensor) -> torch.Tensor:
            next_tokens = torch.tensor(tokens[1:])[:, None]
            return logits[:-1].float().log_softmax(-1).gather(-1, next_tokens)[:, 0]

        return self._tensor("logprobs", tokens, chosen, "logprobs").tolist()

    def _tensor(
        self,
        what: str,
        tokens: Sequence[int],
        part: Callable[[torch.Tensor], torch.Tensor],
        query: str,
    ) -> torch.Tensor:
        """Return a part of the logits."""
        if self._used is not None:
            return part(_forward(self._used, tokens))
        known, key = records().logits, f"{self.key}/{_digest([*tokens, query])}"
        if key not in known:
            self._require_recording(what)
            known[key] = part(_forward(self._loaded, tokens)).float().clone()
        return known[key].clone()  # tests may change it

    def tensor(
        self, query: str, compute: Callable[[torch.nn.Module], torch.Tensor]
    ) -> torch.Tensor:
        """Return a tensor that `compute` returns for the model, recorded as `query`."""
        known, key = records().logits, f"{self.key}/{_digest(query)}"
        if key not in known:
            self._require_recording(query)
            known[key] = compute(self._loaded).float().clone()
        return known[key].clone()

    def _answers(self) -> dict[str, Any]:
        """Return greedy answers by the digest of their prompt, and sets of prompts."""
        return records().answers.setdefault(self.key, {})

    def _layout(self) -> dict[str, Any]:
        known = records().models
        if self._layout_key not in known:
            self._require_recording("the tensors")
            known[self._layout_key] = _record_layout(self._family, self._settings)
        return known[self._layout_key]

    @functools.cached_property
    def _loaded(self) -> torch.nn.Module:
        """The model whose outputs are recorded. No test sees it."""
        return self._load()

    def _load(self) -> torch.nn.Module:
        """Load the checkpoint with Transformers."""
        import transformers

        from tests.checkpoints import head_name

        with tempfile.TemporaryDirectory() as folder, _quiet():
            Reference(self._family, self._settings, self._seed).save(Path(folder))
            head = getattr(transformers, head_name(self._family))
            model = head.from_pretrained(folder, dtype=torch.float32, **_ATTENTION).eval()
        if self._change is not None:
            self._change(model)
        return model

    def _require_recording(self, what: str) -> None:
        """GPU tests compute what is missing: they have Transformers' models on the GPU, too."""
        assert IS_RECORDING or torch.cuda.is_available(), (
            f"{what} of {self._family} {self._settings} (seed {self._seed}) is not recorded: "
            "run `make references`, and commit the files in tests/references"
        )
        if IS_RECORDING:
            import transformers

            records().version = transformers.__version__

    def _search_prompts(
        self, model: torch.nn.Module, lengths: Sequence[int], count: int, vocab: int
    ) -> list[list[int]]:
        random = np.random.RandomState(zlib.crc32(self.key.encode()))
        found = []
        for length in lengths:
            while True:
                prompt = random.randint(0, vocab, length).tolist()
                if _smallest_gap(model, prompt, self._generate(model, prompt, count)) > 10 * NEAR:
                    break
            found.append(prompt)
        return found

    def _greedy(self, model: torch.nn.Module, prompt: Sequence[int], count: int) -> list[int]:
        tokens = self._generate(model, prompt, count)
        gap = _smallest_gap(model, prompt, tokens)
        assert gap > NEAR, f"a near-tie ({gap}) after {prompt}: choose another prompt"
        return tokens

    def _generate(self, model: torch.nn.Module, prompt: Sequence[int], count: int) -> list[int]:
        from tests.checkpoints import greedy_batch

        return greedy_batch(model, [list(prompt)], count)[0]


def _record_layout(family: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Save a model with Transformers and return what it wrote."""
    from tests import checkpoints

    model = checkpoints.random_model(family, settings)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _quiet():
            model.save_pretrained(folder)
        with safe_open(folder / "model.safetensors", "pt") as file:
            tensors = {key: _spread(file.get_tensor(key)) for key in sorted(file.keys())}
        files = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {"parameters": model.num_parameters(), "files": files, "tensors": tensors}


def _spread(values: torch.Tensor) -> list[Any]:
    """Return type, mean, standard deviation and shape."""
    mean, deviation = float(values.float().mean()), float(values.float().std(correction=0))
    return [str(values.dtype), round(mean, 1), float(f"{deviation:.2g}"), *values.shape]


def _random_tensor(
    seed: int, name: str, dtype: str, mean: float, deviation: float, *shape: int
) -> torch.Tensor:
    """Return normal numbers that follow from the seed and the name, the same with any NumPy."""
    random = np.random.RandomState(zlib.crc32(f"{seed} {name}".encode()))
    values = mean + deviation * random.standard_normal(shape)
    return torch.from_numpy(np.asarray(values, np.float32)).to(getattr(torch, dtype.split(".")[1]))


def _forward(model: torch.nn.Module, tokens: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([list(tokens)], device=model.device)).logits[0].cpu()


def _smallest_gap(model: torch.nn.Module, prompt: Sequence[int], answer: Sequence[int]) -> float:
    logits = _forward(model, [*prompt, *answer])[len(prompt) - 1 : -1]
    best = logits.topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _one_line_per_entry(value: dict[str, Any], depth: int = 2, indent: str = "") -> str:
    """Return JSON that has a line for each entry of the first levels, so that changes show."""
    if depth == 0 or not isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"))
    inner = indent + " "
    lines = [
        f"{inner}{json.dumps(key)}: {_one_line_per_entry(value[key], depth - 1, inner)}"
        for key in sorted(value)
    ]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}" if lines else "{}"


@contextlib.contextmanager
def _quiet() -> Any:
    """Hide Transformers' progress bars."""
    with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
        yield


def main() -> None:
    """Join what the processes recorded."""
    whole = Records(FOLDER / "none")
    whole.folder = FOLDER
    if "--add" in sys.argv:
        whole.add(Records(FOLDER))
    for folder in sorted(PARTS.iterdir()):
        whole.add(Records(folder))
    whole.answers = {model: answers for model, answers in whole.answers.items() if answers}
    whole.write()
    shutil.rmtree(PARTS)


if __name__ == "__main__":
    main()
