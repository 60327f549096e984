"""The comparisons of `tk verify`."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from toolkit.config import EngineConfig
from toolkit.errors import ConfigError, OutOfMemoryError
from toolkit.hub import locate
from toolkit.models import describe
from toolkit.models.build import load_config
from toolkit.models.config.model_config import ArchitectureConfig
from toolkit.models.config.registry import describe as describe_model
from toolkit.models.memory import RowMemory
from toolkit.pictures.families import find_family
from toolkit.scheduler.states import GRAIN
from toolkit.text.tokenizer import Tokenizer
from toolkit.verify import engines, transformers_model
from toolkit.verify.compare import FP32_SHARE, NUM_LIKELIEST, Bound, Difference, Scored, compare
from toolkit.verify.engines import Answers
from toolkit.verify.prompts import BUDGET_UNITS, PICTURE_SIZE, Sizes
from toolkit.weights.formats import Packings
from toolkit.weights.layout import Kind
from toolkit.weights.quantization import usable
from toolkit.worker import WorkerInfo
from toolkit.worker.startup.towers import read_pictures

Progress = Callable[[str], None]
"""Called with a description of what begins."""


NOTHING = Bound(0.0, 0.0)
Described = describe.Decoder | describe.External


class Subject(StrEnum):
    """The one thing in which the two sides of a comparison differ."""

    KERNELS = "kernels"
    GRAPHS = "graphs"
    BATCHING = "batching"
    PREFIX_CACHE = "prefix_cache"
    TRANSFORMERS = "transformers"


class Verdict(StrEnum):
    OK = "ok"
    DIFFERS = "differs"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison that was made, or the reason why not."""

    subject: Subject
    sides: str  # in words
    difference: Difference = field(default_factory=Difference)
    bound: Bound = NOTHING
    skipped: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.skipped:
            return Verdict.SKIPPED
        return Verdict.OK if self.bound.allows(self.difference) else Verdict.DIFFERS


@dataclass(frozen=True, slots=True)
class Result:
    """All comparisons of a model."""

    info: WorkerInfo
    tokenizer: Tokenizer | None
    rounding: Difference
    rounding_of: str  # types whose rounding was measured
    comparisons: list[Comparison]
    num_prompts: int
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """OK unless a comparison differs."""
        differs = any(one.verdict == Verdict.DIFFERS for one in self.comparisons)
        return Verdict.DIFFERS if differs else Verdict.OK


def verify(config: EngineConfig, progress: Progress) -> Result:
    """Make all comparisons. Raises ToolkitError if the model cannot run as configured."""
    start = time.perf_counter()
    description = _describe(config)
    sizes = _sizes(config, description)
    # A step has all tokens of a picture that see each other.
    budget = max(BUDGET_UNITS * sizes.unit, sizes.picture)
    budget = config.scheduler.max_num_batched_tokens or budget
    # Engines behind one server are equal.
    config = config.with_settings(max_num_batched_tokens=budget, data_parallel_size=1)
    progress("our kernels, step by step")
    eager = engines.answer(config.with_settings(enforce_eager=True), sizes, evicts=True)
    is_gpu = eager.info.device != "cpu"
    graphs: Answers | str = "--enforce-eager is set"
    if not config.device.enforce_eager:
        progress("CUDA graphs" if is_gpu else "recorded steps")
        graphs = engines.answer(config, sizes, evicts=False)
    progress("plain PyTorch in float32")
    exact = _score_exactly(config, sizes, eager)
    served, name, share = _served_types(config, eager.info, description)
    progress(f"plain PyTorch in {name}")
    rounded = engines.score(served, sizes, eager.sequences, "reference")
    # Without exact values: two paths in the same types differ by as much.
    other = eager.alone if isinstance(exact, str) else exact
    rounding = compare(_pairs(rounded, other))
    bound = Bound.of(rounding, share)
    comparisons = [
        _kernels(eager, exact, bound),
        _graphs(eager, graphs, bound, is_gpu),
        Comparison(
            Subject.BATCHING,
            "alone / in a batch",
            compare(_pairs(eager.together, eager.alone)),
            bound,
        ),
        _prefix_cache(eager, bound),
        _transformers(
            config,
            eager,
            exact,
            Bound.of(rounding, FP32_SHARE),
            _rotation_by_length(description, sizes, eager),
            progress,
        ),
    ]
    seconds = time.perf_counter() - start
    return Result(
        eager.info, eager.tokenizer, rounding, name, comparisons, len(eager.alone), seconds
    )


def _describe(config: EngineConfig) -> Described:
    """Return the model's description. Raises ConfigError if it cannot be verified."""
    given = config.model
    if given.load_format == "dummy":
        raise ConfigError(
            "--load-format dummy has nothing to verify: its random weights are others in each "
            "type. Use a model with weights.",
            param="load_format",
        )
    description = describe_model(_load_config(config))
    if isinstance(description, describe.Encoder):
        raise ConfigError(
            "tk verify compares generated text, and this model is an encoder.", param="model"
        )
    if isinstance(description, describe.Decoder) and description.encoder is not None:
        raise ConfigError(
            "tk verify compares answers to texts, and this model transcribes sound.", param="model"
        )
    return description


def _load_config(config: EngineConfig) -> ArchitectureConfig:
    return load_config(locate(config.model.model, config.model.revision), config.model)


def _sizes(config: EngineConfig, description: Described) -> Sizes:
    folder = locate(config.model.model, config.model.revision)
    found = read_pictures(folder, _load_config(config), config.pictures)
    picture = 0
    if found is not None:
        sight, tokens, processor = found
        grid = find_family(sight.family).token_grid(processor, *PICTURE_SIZE)
        frame = () if tokens.frame is None else (*tokens.frame.before, *tokens.frame.after)
        picture = len(tokens.ids(grid)) + len(frame)
    size = config.cache.block_size
    has_states = any(isinstance(one, RowMemory) for one in description.memory)
    unit = math.lcm(GRAIN, size) if has_states else size
    length = config.model.max_model_len
    return Sizes.fitting(size, unit, description.max_positions, length, picture)


def _score_exactly(config: EngineConfig, sizes: Sizes, eager: Answers) -> list[Scored] | str:
    """Return the scores in fp32, with the served weights, or why there are none.

    They may need twice the memory of the served types: if a GPU has less, the CPU computes them."""
    exact = config.with_settings(dtype="float32", kv_cache_dtype="auto")
    on_cpu = exact.with_settings(device="cpu", tensor_parallel_size=1, pipeline_parallel_size=1)
    reason = ""
    for one in (exact,) if eager.info.device == "cpu" else (exact, on_cpu):
        try:
            return engines.score(one, sizes, eager.sequences, "dequantized")
        except OutOfMemoryError as error:
            reason = f"float32 does not fit: {error.message}"
        gc.collect()  # what was loaded of the model
    return reason


def _served_types(
    config: EngineConfig, info: WorkerInfo, description: Described
) -> tuple[EngineConfig, str, float]:
    """Return (settings of plain PyTorch, names of its types, share of its rounding that is served).

    Where all is served in fp32, bfloat16 is measured."""
    method = config.model.quantization
    if (packings := _load_config(config).packings) is not None:
        device = torch.device("cpu" if info.device == "cpu" else "cuda")
        method = packings.method if _has_products(packings, description, device) else None
    if info.dtype == "float32" and (method, config.cache.kv_cache_dtype) == (None, "auto"):
        return config.with_settings(dtype="bfloat16"), "bfloat16", FP32_SHARE
    parts = [info.dtype]
    if method is not None:
        parts.append(f"{method} products")
    if config.cache.kv_cache_dtype != "auto":
        parts.append(f"{config.cache.kv_cache_dtype} cache")
    return config.with_settings(dtype=info.dtype), ", ".join(parts), 1.0


def _has_products(packings: Packings, description: Described, device: torch.device) -> bool:
    """Return False if the device dequantizes all weights of a checkpoint when it loads them."""
    if not isinstance(description, describe.Decoder):
        return True
    names = (one.name.removesuffix(".weight") for one in description.parameters())
    found = {packing.layout for name in names if (packing := packings.find(name)) is not None}
    return any(usable(layout, device).kind is not Kind.DENSE for layout in found)


def _kernels(eager: Answers, exact: list[Scored] | str, bound: Bound) -> Comparison:
    sides = "our kernels / plain PyTorch"
    if isinstance(exact, str):
        return Comparison(Subject.KERNELS, sides, skipped=exact)
    return Comparison(Subject.KERNELS, sides, compare(_pairs(eager.alone, exact)), bound)


def _graphs(eager: Answers, graphs: Answers | str, bound: Bound, is_gpu: bool) -> Comparison:
    sides = "eager / CUDA graphs" if is_gpu else "eager / recorded steps"
    if isinstance(graphs, str):
        return Comparison(Subject.GRAPHS, sides, skipped=graphs)
    if graphs.why_eager is not None:
        none = "no CUDA graph was captured" if is_gpu else "no step was recorded"
        return Comparison(Subject.GRAPHS, sides, skipped=f"{none}: {graphs.why_eager}")
    pairs = [
        *_pairs(eager.alone, graphs.alone),
        *_pairs(eager.together, graphs.together),
        *_pairs(eager.cached[: len(graphs.cached)], graphs.cached),
    ]
    return Comparison(Subject.GRAPHS, sides, compare(pairs), bound)


def _prefix_cache(eager: Answers, bound: Bound) -> Comparison:
    sides = "cold / cached prefix"
    if not eager.cached:
        return Comparison(Subject.PREFIX_CACHE, sides, skipped="--no-enable-prefix-caching is set")
    rounds = len(eager.cached) // len(eager.alone)
    pairs = _pairs(eager.cached, eager.alone * rounds)
    return Comparison(Subject.PREFIX_CACHE, sides, compare(pairs), bound)


def _transformers(
    config: EngineConfig,
    eager: Answers,
    exact: list[Scored] | str,
    bound: Bound,
    problem: str | None,
    progress: Progress,
) -> Comparison:
    """`problem`: a reason to skip it."""
    sides = "plain PyTorch / Transformers"
    if problem is not None or isinstance(exact, str):
        return Comparison(Subject.TRANSFORMERS, sides, skipped=problem or str(exact))
    progress("Transformers in float32")
    folder = locate(config.model.model, config.model.revision)
    parameters = max(eager.info.model_parameters, eager.info.num_parameters)
    k = min(NUM_LIKELIEST, eager.info.vocab_size - 1)
    try:
        theirs = transformers_model.score(folder, config, parameters, eager.sequences, k)
    except transformers_model.UnsupportedError as error:
        return Comparison(Subject.TRANSFORMERS, sides, skipped=str(error))
    pairs = _pairs(exact[: len(theirs)], theirs)
    return Comparison(Subject.TRANSFORMERS, sides, compare(pairs), bound)


def _rotation_by_length(description: Described, sizes: Sizes, eager: Answers) -> str | None:
    """Return a message if Transformers rotates short sequences by other angles than tk."""
    ropes = description.ropes if isinstance(description, describe.Decoder) else []
    for rope in (one.parameters for one in ropes):
        trained_len = rope.get("original_max_position_embeddings", sizes.context)
        if (
            rope.get("rope_type") == "longrope"
            and min(map(len, eager.sequences)) <= trained_len < sizes.context
        ):
            return (
                "Transformers chooses LongRoPE's factors by each text's length, tk by the maximum. "
                f"They agree with --max-model-len {trained_len}"
            )
    return None


def _pairs(one: list[Scored], other: list[Scored]) -> list[tuple[Scored, Scored]]:
    return list(zip(one, other, strict=True))
