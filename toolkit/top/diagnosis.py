"""Why a server is not faster: the bottleneck by its evidence, and the flag that would change it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolkit.top import wording
from toolkit.top.readings.server import Server
from toolkit.top.view import View, view_of

FULL = 0.95
"""From this share on, a cache, a batch, a core or a power limit counts as used up."""
BUSY_CORE = 0.9
MOSTLY = 0.5
UNSTEADY = 4.0
"""ITL's 99th percentile over its median, from which on prompts are felt by those who read answers."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`kind` is one word; `level` 0: all well, 1: room that nobody uses, 2: something holds requests up."""

    kind: str
    level: int
    text: str
    advice: str = ""

    @property
    def style(self) -> str:
        """How it is written."""
        return ("good", "warn", "bad")[self.level]


NOTHING = Diagnosis("unknown", 0, "No numbers yet.")


def diagnose(server: Server, view: View | None = None) -> Diagnosis:
    """The first of the reasons that the numbers bear out. `view`: the server's, when it is at hand."""
    seen = view_of([server]) if view is None else view
    if seen.running is None or seen.waiting is None:
        return NOTHING
    case = Case(server, seen, seen.running, seen.waiting)
    return next(found for reason in REASONS if (found := reason(case)) is not None)


def worst(servers: list[Server]) -> Diagnosis:
    """Of several servers, that of the one worst off, with its name."""
    found = [(diagnose(server), server.name) for server in servers if server.is_up]
    if not found:
        return NOTHING
    diagnosis, name = max(found, key=lambda one: one[0].level)
    return Diagnosis(diagnosis.kind, diagnosis.level, f"{name}: {diagnosis.text}", diagnosis.advice)


@dataclass(frozen=True, slots=True)
class Case:
    """What the reasons look at."""

    server: Server
    view: View
    running: float
    waiting: float

    @property
    def on_gpu(self) -> bool:
        """Whether the model runs on a GPU, as far as that is known."""
        return not str(setting(self.server, "device") or "").startswith("cpu")

    @property
    def max_running(self) -> float | None:
        """Most requests that run at once."""
        return number(self.server, "max_num_seqs")

    @property
    def prefill_share(self) -> float:
        """Of the tokens computed in the window, those of prompts."""
        prompts = (self.view.mean_prompt_rate or 0.0) * (1.0 - (self.view.prefix_hit_rate or 0.0))
        total = prompts + (self.view.mean_generation_rate or 0.0)
        return prompts / total if total else 0.0


def refusing(case: Case) -> Diagnosis | None:
    """The server turns requests away."""
    if not case.view.rejected:
        return None
    text = f"{wording.count(case.view.rejected)} refused in {wording.duration(case.view.span)}: the queue or a key's share is full"
    return Diagnosis("queue", 2, text, "--max-queue, --max-requests-per-key")


def cache_full(case: Case) -> Diagnosis | None:
    """The KV cache has no room for those who wait, or for those who run."""
    usage, preempted = case.view.kv_usage or 0.0, case.view.recent_preemptions or 0.0
    if not preempted and not (usage >= FULL and case.waiting):
        return None
    said = [f"{wording.percent(case.view.kv_usage, 0)} used"]
    if preempted:
        said.append(f"{wording.count(preempted)} preempted in {wording.duration(case.view.span)}")
    if case.waiting:
        said.append(f"{wording.count(case.waiting)} wait")
    return Diagnosis("KV cache", 2, ", ".join(said), more_cache(case))


def more_cache(case: Case) -> str:
    """What the size of the KV cache is set by: bytes, where they are given, else a share of the memory."""
    given = number(case.server, "kv_cache_memory_bytes")
    if given is not None and not case.server.is_tk:
        return (
            f"raise --kv-cache-memory-bytes or VLLM_CPU_KVCACHE_SPACE ({wording.size(given)} now)"
        )
    if not case.on_gpu:
        return "raise --kv-cache-memory, or lower --max-num-seqs"
    by_share = setting(case.server, "kv_cache_memory") is None
    return f"raise {'--gpu-memory-utilization' if by_share else '--kv-cache-memory'}, or --kv-cache-dtype fp8"


def front_end_busy(case: Case) -> Diagnosis | None:
    """The server's own Python is the bottleneck."""
    workers = number(case.server, "api_workers") or 1.0
    cores = case.view.cpu_cores.get("worker" if workers > 1 else "server", 0.0)
    if cores < BUSY_CORE * workers:
        return None
    flag = "--api-workers" if case.server.is_tk else "--api-server-count"
    text = f"{wording.percent(cores / workers, 0)} of a core for HTTP and text: the engine waits for the front end"
    return Diagnosis("front end", 2, text, f"{flag} {2 * workers:.0f}")


def queue_waits(case: Case) -> Diagnosis | None:
    """All places are taken, and the cache would have room for more."""
    limit = case.max_running
    if not case.waiting or (limit is not None and case.running < FULL * limit):
        return None
    queue = case.view.latencies.get("queue")
    told = (
        f" for {wording.seconds(queue.p50)}" if queue is not None and queue.p50 is not None else ""
    )
    room = f"KV cache {wording.percent(case.view.kv_usage, 0)}"
    text = (
        f"{wording.count(case.waiting)} wait{told} while {wording.count(case.running)} run ({room})"
    )
    return Diagnosis("queue", 2, text, f"raise --max-num-seqs{_from(limit)}, or add a server")


def prompts_in_the_way(case: Case) -> Diagnosis | None:
    """Prompts take most of the computing, and somebody waits for it: in the queue, or between two tokens."""
    itl = case.view.latencies.get("ITL")
    unsteady = itl is not None and itl.p50 and itl.p99 and itl.p99 > UNSTEADY * itl.p50
    if case.prefill_share < MOSTLY or not (case.waiting or unsteady):
        return None
    text = f"{wording.percent(case.prefill_share, 0)} of computing is prompts"
    if unsteady and itl is not None:
        text += f"; ITL p50 {wording.seconds(itl.p50)}, p99 {wording.seconds(itl.p99)}"
    elif case.view.prefix_hit_rate is not None:
        text += f"; {wording.percent(case.view.prefix_hit_rate, 0)} cached"
    if setting(case.server, "enable_prefix_caching") in (False, "False"):
        return Diagnosis("prefill", 2, text, "--enable-prefix-caching")
    budget = number(case.server, "max_num_batched_tokens")
    change = "lower" if unsteady else "raise"
    return Diagnosis("prefill", 2, text, f"{change} --max-num-batched-tokens{_from(budget)}")


def power_bound(case: Case) -> Diagnosis | None:
    """The GPU draws what it may, and slows its clocks down."""
    power, limit = case.view.gpu_power, case.view.gpu_power_limit
    if not power or not limit or power < FULL * limit:
        return None
    text = f"the GPU draws {power:,.0f} of the {limit:,.0f} W that it may: its clocks are held back"
    return Diagnosis("power", 2, text, "--quantization fp8, or a higher limit (nvidia-smi -pl)")


def idle(case: Case) -> Diagnosis | None:
    """There is nothing to do."""
    if case.running or case.waiting or case.view.finished_rate or case.view.generation_rate:
        return None
    return Diagnosis("idle", 0, "nothing runs and nothing waits")


def client_bound(case: Case) -> Diagnosis | None:
    """There is room that nobody asks for."""
    limit = case.max_running
    running = max(case.running, case.view.batch_size or 0.0)  # of now, and of the last while
    if case.waiting or limit is None or running >= MOSTLY * limit:
        return None
    text = f"{wording.count(running)} of {wording.count(limit)} places taken, nothing waits: the server has room"
    return Diagnosis("client", 1, text, "send more at once")


def well(case: Case) -> Diagnosis:
    """Whatever else there is."""
    return Diagnosis(
        "fine", 0, f"{wording.count(case.running)} run, {wording.count(case.waiting)} wait"
    )


REASONS: tuple[Callable[[Case], Diagnosis | None], ...] = (
    refusing,
    cache_full,
    front_end_busy,
    queue_waits,
    prompts_in_the_way,
    power_bound,
    idle,
    client_bound,
    well,
)
"""In the order in which they are looked for."""


def setting(server: Server, name: str) -> Any:
    """A setting in force, from what the server says of itself, or its metrics do; None when neither does."""
    for section in _sections(server.settings or {}):
        if section.get(name) is not None and not isinstance(section[name], dict):
            return section[name]
    return server.last.labels.get(name) if server.last is not None else None


def number(server: Server, name: str) -> float | None:
    """A setting that is a number; None when it is not known."""
    try:
        return float(setting(server, name))
    except (TypeError, ValueError):
        return None


def _sections(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What the model runs on first: there, what was left to the server is resolved."""
    engine = settings.get("engine")
    inner = engine.values() if isinstance(engine, dict) else ()
    found = [settings.get("device"), *inner, settings.get("server")]
    return [section for section in found if isinstance(section, dict)]


def _from(value: float | None) -> str:
    return "" if value is None else f" ({value:.0f} now)"
