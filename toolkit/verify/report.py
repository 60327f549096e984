"""Output of `tk verify`: a table and a paragraph for each comparison that differs, or JSON."""

from __future__ import annotations

from typing import Any

from toolkit.config import EngineConfig
from toolkit.inventory.console import print_json, print_note, print_rich
from toolkit.verify.compare import Place
from toolkit.verify.run import Comparison, Result, Subject, Verdict

COLORS = {Verdict.OK: "green", Verdict.DIFFERS: "red", Verdict.SKIPPED: "yellow"}
_REPORT = "Please report it with the output of 'tk collect-env'."
ADVICE = {
    Subject.KERNELS: (
        "A kernel computes something other than PyTorch, or with other weights. Compare with "
        f"--attention-backend torch, and without --quantization and --kv-cache-dtype. {_REPORT}"
    ),
    Subject.GRAPHS: (
        "A replayed step reads or writes what another step left. --enforce-eager avoids it. On a "
        f"GPU, TOOLKIT_EARLY_LAUNCH=0 shows whether kernels start too early. {_REPORT}"
    ),
    Subject.BATCHING: (
        "A request's answer depends on what runs next to it, or on how its prompt is chunked. "
        f"--max-num-seqs 1 and a larger --max-num-batched-tokens avoid it. {_REPORT}"
    ),
    Subject.PREFIX_CACHE: (
        "A cached block does not hold what its tokens say. --no-enable-prefix-caching avoids it. "
        f"{_REPORT}"
    ),
    Subject.TRANSFORMERS: (
        "The model is built differently: a field of config.json is read in another way (rotary "
        "base, scale, norm), or weights go to the wrong place. Its answers may be worse everywhere "
        f"in tk, with every setting. {_REPORT}"
    ),
}


def report(result: Result, config: EngineConfig, *, as_json: bool) -> int:
    """Print the result. Return the exit code: 1 if a comparison differs."""
    if as_json:
        print_json(_json(result, config))
    else:
        _print_table(result, config)
    return int(result.verdict == Verdict.DIFFERS)


def explain(one: Comparison, result: Result) -> str:
    """Return what differs, by how much, and what to do."""
    found, bound = one.difference, one.bound
    exceeded = "mean" if found.mean > bound.mean else "maximum"
    times = found.mean / bound.mean if exceeded == "mean" else found.max / bound.max
    return (
        f"{one.subject} differs ({one.sides}): log-probabilities by {found.mean:.2g} on average "
        f"and {found.max:.2g} at most; rounding explains {bound.mean:.2g} and {bound.max:.2g}. The "
        f"{exceeded} is {times:.3g} times its bound. The largest difference is in "
        f"{_where(found.place, result)}. {ADVICE[one.subject]}"
    )


def _print_table(result: Result, config: EngineConfig) -> None:
    from rich.table import Table
    from rich.text import Text

    info, rounding = result.info, result.rounding
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("comparison", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name in ("mean", "bound", "max", "bound", "greedy"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("largest in")
    for one in result.comparisons:
        verdict = Text(one.verdict, COLORS[one.verdict])
        if one.skipped:
            table.add_row(one.subject, one.sides, verdict)
            continue
        found, bound = one.difference, one.bound
        numbers = (found.mean, bound.mean, found.max, bound.max)
        table.add_row(
            one.subject,
            one.sides,
            verdict,
            *(f"{number:.1e}" for number in numbers),
            f"{found.num_agreed}/{found.num_positions}",
            _where(found.place, result),
        )
    model = config.model.model or "tk-demo"
    print_rich(
        f"{model}: {info.dtype} on {info.device}, attention {info.attention_backend}. Absolute "
        f"differences of log-probabilities.",
        f"Rounding of this model in {result.rounding_of}: {rounding.mean:.1e} on average, "
        f"{rounding.max:.1e} at most.",
        f"Prompts: {result.num_prompts}{', the last with a picture' * (info.sight is not None)}.",
        "",
        table,
        "",
    )
    for one in result.comparisons:
        if one.skipped:
            print_note(f"{one.subject} skipped: {one.skipped}.")
        elif one.verdict == Verdict.DIFFERS:
            print_note(explain(one, result))
    print_rich(
        Text.assemble((result.verdict, COLORS[result.verdict]), f" ({result.seconds:.1f} s)")
    )


def _where(place: Place | None, result: Result) -> str:
    if place is None:
        return ""
    tokenizer = result.tokenizer
    text = "" if tokenizer is None else f" {tokenizer.token_names[place.token]!r}"
    prompt = place.pair % result.num_prompts
    return f"prompt {prompt}, position {place.position}, token {place.token}{text}"


def _place_json(place: Place, num_prompts: int) -> dict[str, int]:
    prompt = place.pair % num_prompts
    return {"prompt": prompt, "position": place.position, "token": place.token}


def _json(result: Result, config: EngineConfig) -> dict[str, Any]:
    info = result.info
    return {
        "model": config.model.model or "tk-demo",
        "dtype": info.dtype,
        "device": info.device,
        "attention_backend": info.attention_backend,
        "verdict": result.verdict,
        "seconds": round(result.seconds, 3),
        "prompts": result.num_prompts,
        "has_picture": info.sight is not None,
        "rounding": {
            "of": result.rounding_of,
            "mean": result.rounding.mean,
            "max": result.rounding.max,
        },
        "comparisons": [_comparison_json(one, result) for one in result.comparisons],
    }


def _comparison_json(one: Comparison, result: Result) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": one.subject, "sides": one.sides, "verdict": one.verdict}
    if one.skipped:
        return shown | {"reason": one.skipped}
    found = one.difference
    shown |= {
        "mean": found.mean,
        "mean_bound": one.bound.mean,
        "max": found.max,
        "max_bound": one.bound.max,
        "positions": found.num_positions,
        "greedy_agreed": found.num_agreed,
        "largest": None if found.place is None else _place_json(found.place, result.num_prompts),
    }
    if one.verdict == Verdict.DIFFERS:
        shown["reason"] = explain(one, result)
    return shown
