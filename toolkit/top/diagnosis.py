"""Diagnosis of a server: its bottleneck, the evidence, and the flag to change."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolkit.top import wording
from toolkit.top.readings.server import Server
from toolkit.top.view import View, view_of

FULL = 0.95  # share from which a cache, batch or power limit counts as full
BUSY_CORE = 0.9
MOSTLY = 0.5
UNSTEADY = 4.0  # ratio of ITL's p99 to its median above which prompts disturb running answers


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`kind` is a word. `level` is 0 if all is well, 1 for spare capacity, 2 for a bottleneck."""

    kind: str
    level: int
    text: str
    advice: str = ""

    @property
    def style(self) -> str:
        return ("good", "warn", "bad")[self.level]


REJECTIONS = {
    "queue": ("the queue is full", "--max-queue"),
    "key": ("a key has too many open requests", "--max-requests-per-key"),
    "rate": ("a key sends too many requests", "--requests-per-minute"),
}
"""Causes and settings of rejections, by the reason in the metrics."""
NOTHING = Diagnosis("unknown", 0, "No numbers yet.")


def diagnose(server: Server, view: View | None = None) -> Diagnosis:
    """Return the finding of the first rule that applies. `view`: the server's, if known."""
    numbers = view_of([server]) if view is None else view
    if numbers.running is None or numbers.waiting is None:
        return NOTHING
    case = ServerCase(server, numbers, numbers.running, numbers.waiting)
    return next(found for rule in RULES if (found := rule(case)) is not None)


def worst(servers: list[Server]) -> Diagnosis:
    """Return the most severe diagnosis of several servers, with the server's name."""
    found = [(diagnose(server), server.name) for server in servers if server.is_up]
    if not found:
        return NOTHING
    diagnosis, name = max(found, key=lambda one: one[0].level)
    return Diagnosis(diagnosis.kind, diagnosis.level, f"{name}: {diagnosis.text}", diagnosis.advice)


@dataclass(frozen=True, slots=True)
class ServerCase:
    """Input of the rules: a server and its numbers."""

    server: Server
    view: View
    running: float
    waiting: float

    @property
    def on_gpu(self) -> bool:
        """True unless the server is known to run on a CPU."""
        return not str(setting(self.server, "device") or "").startswith("cpu")

    @property
    def max_num_seqs(self) -> float | None:
        return number(self.server, "max_num_seqs")

    @property
    def prefill_share(self) -> float:
        """Share of prompt tokens in the tokens computed in the window."""
        prompts = (self.view.mean_prompt_rate or 0.0) * (1.0 - (self.view.prefix_hit_rate or 0.0))
        total = prompts + (self.view.mean_generation_rate or 0.0)
        return prompts / total if total else 0.0


def check_rejections(case: ServerCase) -> Diagnosis | None:
    """Report requests that the server rejected."""
    if not case.view.rejected:
        return None
    span = wording.duration(case.view.span)
    reason, count = max(case.view.rejected.items(), key=lambda one: one[1])
    why, flag = REJECTIONS.get(reason, (reason, ""))
    text = f"{wording.count(count)} refused in {span}: {why}"
    return Diagnosis("queue", 2, text, f"raise {flag}" if flag else "")


def check_kv_cache(case: ServerCase) -> Diagnosis | None:
    """Report a KV cache too small for the waiting or the running requests."""
    usage, preempted = case.view.kv_usage or 0.0, case.view.recent_preemptions or 0.0
    if not preempted and not (usage >= FULL and case.waiting):
        return None
    evidence = [f"{wording.percent(case.view.kv_usage, 0)} used"]
    if preempted:
        span = wording.duration(case.view.span)
        evidence.append(f"{wording.count(preempted)} preempted in {span}")
    if case.waiting:
        evidence.append(f"{wording.count(case.waiting)} waiting")
    return Diagnosis("KV cache", 2, ", ".join(evidence), advise_cache(case))


def advise_cache(case: ServerCase) -> str:
    """Name the setting of the KV cache's size: bytes if given, else a share of memory."""
    given = number(case.server, "kv_cache_memory_bytes")
    if given is not None and not case.server.is_tk:
        flags = "--kv-cache-memory-bytes or VLLM_CPU_KVCACHE_SPACE"
        return f"raise {flags} ({wording.size(given)} now)"
    if not case.on_gpu:
        return "raise --kv-cache-memory, or lower --max-num-seqs"
    is_share = setting(case.server, "kv_cache_memory") is None
    flag = "--gpu-memory-utilization" if is_share else "--kv-cache-memory"
    is_small = setting(case.server, "kv_cache_dtype") == "fp8"
    return f"raise {flag}{'' if is_small else ', or --kv-cache-dtype fp8'}"


def check_front_end(case: ServerCase) -> Diagnosis | None:
    """Report processes for HTTP and text that use all of their cores."""
    workers = number(case.server, "api_workers") or 1.0
    cores = case.view.cpu_cores.get("worker" if workers > 1 else "server", 0.0)
    if cores < BUSY_CORE * workers:
        return None
    flag = "--api-workers" if case.server.is_tk else "--api-server-count"
    text = (
        f"HTTP and text take {wording.percent(cores / workers, 0)} of a core: "
        "the engine waits for the front end"
    )
    return Diagnosis("front end", 2, text, f"{flag} {2 * workers:.0f}")


def check_queue(case: ServerCase) -> Diagnosis | None:
    """Report a queue although the KV cache has space: the batch is at its limit."""
    limit = case.max_num_seqs
    if not case.waiting or (limit is not None and case.running < FULL * limit):
        return None
    queue = case.view.latencies.get("queue")
    median = queue.p50 if queue is not None else None
    time = f" for {wording.seconds(median)}" if median is not None else ""
    text = (
        f"{wording.count(case.waiting)} waiting{time}, {wording.count(case.running)} running "
        f"(KV cache {wording.percent(case.view.kv_usage, 0)})"
    )
    advice = "" if limit is None else f"raise --max-num-seqs{_current(limit)}, or add a server"
    return Diagnosis("queue", 2, text, advice)


def check_adapters(case: ServerCase) -> Diagnosis | None:
    """Report requests whose adapters wait for those in use."""
    limit, adapters = number(case.server, "max_loras"), case.view.adapters.values()
    used = sum(running > 0 for running, _ in adapters)
    waiting = sum(waiting for running, waiting in adapters if not running)
    if limit is None or used < limit or not waiting:
        return None
    text = f"{wording.count(waiting)} waiting for an adapter, {used} adapters are in use"
    return Diagnosis("adapters", 2, text, f"raise --max-loras{_current(limit)}")


def check_prefill(case: ServerCase) -> Diagnosis | None:
    """Report prompts that take most of the compute and delay queued requests or next tokens.

    The budget of a step is their limit only if steps come near it."""
    budget, largest = number(case.server, "max_num_batched_tokens"), case.view.largest_steps
    if not (case.running or case.waiting):
        return None
    itl = case.view.latencies.get("ITL")
    is_unsteady = itl is not None and itl.p50 and itl.p99 and itl.p99 > UNSTEADY * itl.p50
    if case.prefill_share < MOSTLY or not (case.waiting or is_unsteady):
        return None
    text = f"prompts are {wording.percent(case.prefill_share, 0)} of the computed tokens"
    if is_unsteady and itl is not None:
        text += f"; ITL p50 {wording.seconds(itl.p50)}, p99 {wording.seconds(itl.p99)}"
    elif case.view.prefix_hit_rate is not None:
        text += f"; {wording.percent(case.view.prefix_hit_rate, 0)} cached"
    if setting(case.server, "enable_prefix_caching") in (False, "False"):
        return Diagnosis("prefill", 2, text, "--enable-prefix-caching, if prompts begin alike")
    if budget is None or largest is None or largest < MOSTLY * budget:
        return None
    text += f"; steps of up to {wording.count(largest)} tokens"
    change = "lower" if is_unsteady else "raise"
    return Diagnosis("prefill", 2, text, f"{change} --max-num-batched-tokens{_current(budget)}")


def check_power(case: ServerCase) -> Diagnosis | None:
    """Report a GPU at its power limit."""
    power, limit = case.view.gpu_power, case.view.gpu_power_limit
    if not power or not limit or power < FULL * limit:
        return None
    text = f"the GPU draws {power:,.0f} W, its limit is {limit:,.0f} W: its clocks are throttled"
    raising = "a higher limit (nvidia-smi -pl)"
    is_quantized = setting(case.server, "quantization") is not None
    return Diagnosis(
        "power", 2, text, raising if is_quantized else f"--quantization fp8, or {raising}"
    )


def check_idle(case: ServerCase) -> Diagnosis | None:
    """Report a server without requests: what limited earlier ones, no longer matters."""
    if case.running or case.waiting or case.view.finished_rate or case.view.generation_rate:
        return None
    return Diagnosis("idle", 0, "no requests")


def check_client(case: ServerCase) -> Diagnosis | None:
    """Report a batch that is at most half full, without a queue."""
    limit = case.max_num_seqs
    running = max(case.running, case.view.batch_size or 0.0)  # now, and over the window
    if case.waiting or limit is None or running >= MOSTLY * limit:
        return None
    text = (
        f"{wording.count(running)} of {wording.count(limit)} slots used, none waiting: "
        "the server has spare capacity"
    )
    return Diagnosis("client", 1, text, "send more requests at once")


def report_load(case: ServerCase) -> Diagnosis:
    """Report the load: no rule found a bottleneck."""
    text = f"{wording.count(case.running)} running, {wording.count(case.waiting)} waiting"
    return Diagnosis("fine", 0, text)


RULES: tuple[Callable[[ServerCase], Diagnosis | None], ...] = (
    check_rejections,
    check_idle,
    check_kv_cache,
    check_front_end,
    check_queue,
    check_adapters,
    check_prefill,
    check_power,
    check_client,
    report_load,
)  # rules, the most important first


def setting(server: Server, name: str) -> Any:
    """Return a setting from /server_info, else from the metrics; None if unknown."""
    for section in _sections(server.settings or {}):
        if section.get(name) is not None and not isinstance(section[name], dict):
            return section[name]
    return server.last.labels.get(name) if server.last is not None else None


def number(server: Server, name: str) -> float | None:
    """Return a numeric setting, or None if it is unknown."""
    try:
        return float(setting(server, name))
    except (TypeError, ValueError):
        return None


def _sections(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the sections of the settings. "device" is first: it has the resolved values."""
    engine = settings.get("engine")
    inner = engine.values() if isinstance(engine, dict) else ()
    found = [settings.get("device"), *inner, settings.get("server")]
    return [section for section in found if isinstance(section, dict)]


def _current(value: float | None) -> str:
    return "" if value is None else f" ({value:.0f} now)"
