"""Every decoder of Transformers runs with its tokens, or is refused with a reason."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoints, engines
from tests.checkpoints import generate
from tests.models.conftest import SMALL_POOL, Case
from tests.models.decoders import choose_config, class_name, make_decoder, model_types
from toolkit import LLM
from toolkit.errors import OutOfMemoryError, ToolkitError
from toolkit.models.config.registry import supported

TABLE = Path(__file__).parents[2] / "docs" / "architectures.md"
SAMPLE = (
    *("apertus", "deepseek_v3", "gpt_oss", "hunyuan_v1_moe", "olmoe", "persimmon"),
    *("bloom", "diffllama", "mamba", "mimo_v2_flash", "roberta"),
)
"""Scalars, compressed keys, sinks and windows, parameters in fp32, merged experts, norms of a
fused product; and reasons for a refusal."""
COUNT = 32  # tokens of an answer
ENGINE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 160}
MODES: tuple[dict[str, Any], ...] = (
    SMALL_POOL | {"max_num_batched_tokens": 7, "swap_space": 0.0, "async_scheduling": False},
    SMALL_POOL | {"swap_space": 0.001, "async_scheduling": True},
)
"""Requests preempted and recomputed, with prompts in chunks; or swapped."""
INTRODUCTION = """# Every decoder of Transformers

How tk runs the causal language models that Transformers {version} lists, and why it does not
run the others. `make test-models` tries each with a small random model, in chunks, from the prefix
cache and preempted, and compares its tokens with those of Transformers. WRITE=1 writes this page.

- *tk*: its own code ([models.md](models.md)).
- *Transformers*: Transformers' code with tk's attention, cache, products and norms.

| model_type | runs through, or why not |
|---|---|
"""


NOT_TRIED = "not tried: Transformers makes no small model of it"


def verdict(model_type: str, folder: Path) -> str:
    """Return how the model runs, or why not. Fails if its answers are wrong."""
    if class_name(model_type) in supported():
        return "tk"
    try:
        config = choose_config(model_type)
    except Exception:  # its usual values fail its own checks
        return NOT_TRIED
    config.architectures = [class_name(model_type)]
    checkpoints.make_tokenizer().save_pretrained(folder)
    config.save_pretrained(folder)
    try:
        LLM(str(folder), **ENGINE, load_format="dummy").shutdown()
    except OutOfMemoryError:  # there is no small config
        return NOT_TRIED
    except ToolkitError as error:
        return error.message
    model = make_decoder(model_type)
    checkpoints.save(model, folder, tokenizer=False)
    case = Case(model_type, folder, model)
    case.prompts = case.prompts[2:5]
    llm = case.engine(**ENGINE)
    for prompt in case.prompts:
        ours, expected = checkpoints.engine_logits(llm, prompt), case.logits(prompt)
        assert (ours - expected).norm() / expected.norm() < 1e-4
    case.assert_greedy(generate(llm, case.prompts, max_tokens=COUNT), num_tokens=COUNT)
    again = generate(llm, case.prompts, max_tokens=17)  # into the next block
    for result in again:
        grain = engines.grain(llm)
        assert result.num_cached_tokens == (len(result.prompt_token_ids) - 1) // grain * grain
    case.assert_greedy(again, num_tokens=17)
    llm.shutdown()
    for settings in MODES:
        llm = case.engine(**ENGINE, **settings)
        case.assert_greedy(generate(llm, case.prompts, max_tokens=COUNT), num_tokens=COUNT)
        llm.shutdown()
    return "Transformers"


def row(model_type: str, folder: Path) -> str:
    """Return the model's row in the table."""
    text = re.sub(
        r"^.*?[Uu]nsupported architecture '\w+'(?: with model_type '[^']*')?[:.] ",
        "",
        verdict(model_type, folder),
    )
    text = re.sub(r" \(.*|Supported: .*| docs/.*|, and tk caches.*", "", text)
    return f"| `{model_type}` | {text.rstrip('. ') or 'not listed as a decoder by its class'} |"


@pytest.mark.parametrize("model_type", SAMPLE)
def test_decoders_run_or_are_refused_as_documented(tmp_path, model_type):
    assert row(model_type, tmp_path) in TABLE.read_text().split("\n")


@pytest.mark.models
def test_the_table_of_all_decoders_is_true(tmp_path):
    """With WRITE=1 it is written."""

    import transformers

    rows = [row(model_type, tmp_path / model_type) for model_type in sorted(model_types())]
    text = INTRODUCTION.format(version=transformers.__version__) + "\n".join(rows) + "\n"
    if os.environ.get("WRITE"):
        TABLE.write_text(text)
    assert TABLE.read_text() == text
