"""Plant small bugs, one at a time, and see whether tests notice: `python -m tools.mutations`.

The tests run in a worktree of a revision (`--at`), which imports its own code and has a copy of the
compiled CPU kernels of this checkout. They have to pass before anything is planted. Exit codes: 0
if tests notice every bug, 1 if one survives, 2 if the run says nothing about the tests.

Test paths are files or folders: the names of tests change more often. A path that a revision
lacks is left out."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
KERNELS = Path("kernels") / "cpu" / "_kernels.so"
TEST_LIMIT = 120  # seconds for one test; a test that hangs has noticed
RUN_LIMIT = 1800.0  # seconds for all tests of one run
PROBE = """
import toolkit, toolkit.kernels
from toolkit.kernels import cpu
print(toolkit.__file__, toolkit.kernels.__file__, cpu.available(), sep="\\n")
"""


class UnusableError(Exception):
    """The run says nothing about the tests."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A bug: a text that occurs once in its file, and what replaces it."""

    package: str
    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def apply(self, source: str) -> str:
        """Return the file's source with the bug. Raises UnusableError if the text does not fit."""
        if (count := source.count(self.before)) != 1:
            raise UnusableError(f"{self.name}: {self.file} has its text {count} times")
        changed = source.replace(self.before, self.after)
        try:
            compile(changed, self.file, "exec")
        except SyntaxError as error:
            raise UnusableError(f"{self.name}: {error}") from None
        return changed


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of running the tests of a mutation."""

    package: str
    name: str
    is_caught: bool
    evidence: str  # the first test that failed, or how the run ended; empty: all passed
    seconds: float

    def __str__(self) -> str:
        verdict = "caught  " if self.is_caught else "SURVIVED"
        return f"{self.package:<12}{self.name:<41}{verdict}{self.seconds:7.1f} s  {self.evidence}"


def main() -> int:
    """Run the command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutations", description=__doc__)
    parser.add_argument("--at", default="HEAD", metavar="REVISION")
    names = [one.name for one in MUTATIONS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the outcomes here")
    options = parser.parse_args()
    chosen = [one for one in MUTATIONS if options.only is None or one.name in options.only]
    try:
        with _worktree(options.at) as folder:
            outcomes = list(_outcomes(folder, chosen))
    except UnusableError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1) + "\n")
    num_caught = sum(one.is_caught for one in outcomes)
    print(f"{num_caught} of {len(outcomes)} caught")
    return 0 if num_caught == len(outcomes) else 1


def _outcomes(folder: Path, mutations: Sequence[Mutation]) -> Iterator[Outcome]:
    """Run the tests without a bug, then with each. Prints and yields the outcomes."""
    tests = {one.name: _present(folder, one) for one in mutations}
    for one in mutations:
        one.apply((folder / one.file).read_text())
    paths = list(dict.fromkeys(path for found in tests.values() for path in found))
    start = time.monotonic()
    if evidence := _first_failure(folder, paths):
        raise UnusableError(f"tests fail without any bug: {evidence}")
    print(f"{len(paths)} test paths pass in {time.monotonic() - start:.0f} s", flush=True)
    for one in mutations:
        start = time.monotonic()
        with _planted(folder / one.file, one):
            evidence = _first_failure(folder, tests[one.name])
        seconds = time.monotonic() - start
        outcome = Outcome(one.package, one.name, bool(evidence), evidence, round(seconds, 1))
        print(outcome, flush=True)
        yield outcome


def _present(folder: Path, mutation: Mutation) -> list[str]:
    """Return the test paths that the revision has. Raises UnusableError if there are none."""
    found = [path for path in mutation.tests if (folder / path).exists()]
    for path in mutation.tests:
        if path not in found:
            print(f"{mutation.name}: the revision has no {path}", file=sys.stderr)
    if not found:
        raise UnusableError(f"{mutation.name}: the revision has none of its tests")
    return found


@contextlib.contextmanager
def _worktree(revision: str) -> Iterator[Path]:
    """Check out a revision into a temporary folder, whose Python imports that revision."""
    with tempfile.TemporaryDirectory(prefix="tk-mutations-") as temporary:
        folder = Path(temporary).resolve() / "tree"
        _git("worktree", "add", "--quiet", "--detach", str(folder), revision)
        try:
            if not (ROOT / KERNELS).is_file():
                raise UnusableError(f"{KERNELS} is missing: python setup.py build_ext --inplace")
            shutil.copy2(ROOT / KERNELS, folder / KERNELS)
            (folder / "toolkit" / "kernels").symlink_to(Path("..") / "kernels")
            for place in (folder, Path(temporary)):
                _check_imports(folder, place)
            yield folder
        finally:
            _git("worktree", "remove", "--force", str(folder))


def _git(*arguments: str) -> None:
    command = ["git", "-C", str(ROOT), *arguments]
    result = subprocess.run(command, text=True, capture_output=True, check=False)
    if result.returncode:
        raise UnusableError(result.stderr.strip())


def _check_imports(folder: Path, place: Path) -> None:
    """Raise UnusableError if Python, started in `place`, imports another checkout's code."""
    result = subprocess.run(
        [sys.executable, "-c", PROBE],
        cwd=place,
        env=_environment(folder),
        text=True,
        capture_output=True,
        check=False,
    )
    expected = [folder / "toolkit" / "__init__.py", folder / "kernels" / "__init__.py"]
    *files, kernels = result.stdout.split("\n")[:3] if result.returncode == 0 else [result.stderr]
    if [Path(file).resolve() for file in files] != expected:
        raise UnusableError(f"Python imports {files or kernels} instead of {folder}")
    if kernels != "True":
        raise UnusableError("the compiled kernels of this checkout do not load in the worktree")


def _environment(folder: Path) -> dict[str, str]:
    """Return the variables of processes that import the worktree's code, wherever they start."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    # As under pytest-xdist.
    changed = {"PYTHONPATH": path, "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    return os.environ | changed


@contextlib.contextmanager
def _planted(file: Path, mutation: Mutation) -> Iterator[None]:
    """Plant a bug inside the block."""
    source = file.read_text()
    try:
        _write(file, mutation.apply(source))
        yield
    finally:
        _write(file, source)


def _write(file: Path, source: str) -> None:
    """Write a module. Python would keep bytecode of the same second and size."""
    file.write_text(source)
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def _first_failure(folder: Path, paths: Iterable[str]) -> str:
    """Run tests until one fails. Return it, or how the run ended; empty if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--timeout", str(TEST_LIMIT)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, *paths],
            cwd=folder,
            env=_environment(folder),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(RUN_LIMIT)
        except subprocess.TimeoutExpired:
            return f"no end after {RUN_LIMIT:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    if code == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", text, re.MULTILINE)
    if failed is None and code != 1:  # not a verdict of tests
        raise UnusableError(f"pytest ended with exit code {code}:\n{text[-2000:]}")
    return failed[1] if failed is not None else f"exit code {code}"


MUTATIONS = (
    Mutation(
        "scheduler",
        "prefixes-ignore-the-salt",
        "toolkit/scheduler/blocks/block_pool.py",
        'b"".join((parent, tokens, extra.encode()))',
        'b"".join((parent, tokens))',
        ("tests/scheduler/test_prefix_cache.py",),
    ),
    Mutation(
        "scheduler",
        "clips-that-lost-pages-are-found",
        "toolkit/scheduler/blocks/block_tables.py",
        "any(len(cached.tables[g]) < self._num_pages(g) for g in self._features)",
        "any(not cached.tables[g] for g in self._features)",
        ("tests/scheduler/test_scheduler.py",),
    ),
    Mutation(
        "scheduler",
        "a-request-is-in-two-stages",
        "toolkit/scheduler/planner.py",
        "            wanted *= rows.in_flight.take(where) == 0\n",
        "",
        ("tests/scheduler/test_stages.py", "tests/distributed/test_pipeline_parallel.py"),
    ),
    Mutation(
        "sampling",
        "penalties-skip-the-first-token",
        "kernels/plain.py",
        "output = known & (position >= ints[own, 2, None])",
        "output = known & (position > ints[own, 2, None])",
        ("tests/sampling/test_sampler.py",),
    ),
    Mutation(
        "sampling",
        "a-single-draft-stays-in-the-grammar",
        "toolkit/sampling/grammar.py",
        "            if before.num_consumed:\n",
        "            if before.num_consumed > 1:\n",
        ("tests/sampling/test_draft_masks.py",),
    ),
    Mutation(
        "sampling",
        "ranks-count-the-token-itself",
        "kernels/logprobs.py",
        "np.count_nonzero(row > one)",
        "np.count_nonzero(row >= one)",
        ("tests/engine/test_llm.py",),
    ),
    Mutation(
        "text",
        "split-characters-are-lost",
        "toolkit/text/tokenizer.py",
        "self._has_partial_character = bool(self._decoder.getstate()[0])",
        "self._has_partial_character = False",
        ("tests/text/test_tokenizer.py", "tests/engine/test_text.py"),
    ),
    Mutation(
        "text",
        "commentary-to-tools-is-content",
        "toolkit/text/harmony.py",
        'return channel == "analysis" or (channel != "final" and bool(_recipient(header)))',
        'return channel == "analysis"',
        ("tests/text/test_harmony.py",),
    ),
    Mutation(
        "text",
        "escaped-backslash-escapes-the-quote",
        "toolkit/text/tool_formats.py",
        'escaped = character == "\\\\" and not escaped',
        'escaped = character == "\\\\"',
        ("tests/text/test_tool_formats.py",),
    ),
    Mutation(
        "api",
        "choices-of-prompts-are-interleaved",
        "toolkit/api/openai/generation.py",
        "yield prompt * self.n + delta.index, delta",
        "yield prompt + delta.index * len(self.streams), delta",
        ("tests/api/openai/test_api_completions.py",),
    ),
    Mutation(
        "api",
        "disconnects-are-not-awaited",
        "toolkit/api/http/streaming.py",
        "await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)",
        "await asyncio.wait({working}, return_when=asyncio.FIRST_COMPLETED)",
        ("tests/api/connections/test_api_disconnects.py",),
    ),
    Mutation(
        "api",
        "status-400-is-not-counted",
        "toolkit/api/http/layers/gate.py",
        "if failed >= 400:",
        "if failed > 400:",
        ("tests/api/test_api_dashboard.py",),
    ),
    Mutation(
        "serving",
        "drains-do-not-wait",
        "toolkit/api/http_server.py",
        "        while self.num_active:\n",
        "        if self.num_active:\n",
        ("tests/serving/test_shutdown.py",),
    ),
    Mutation(
        "serving",
        "all-connections-go-to-one-worker",
        "toolkit/serving/supervisor.py",
        "[*self._workers[index + 1 :], *self._workers[: index + 1]]",
        "[*self._workers[index:], *self._workers[:index]]",
        ("tests/serving/test_workers.py",),
    ),
    Mutation(
        "serving",
        "requests-of-dead-workers-run-on",
        "toolkit/serving/model_cores.py",
        "core.link.send(ClientGone(client))",
        "core.link.send(ClientGone(core.index))",
        ("tests/serving/test_workers.py",),
    ),
    Mutation(
        "engine",
        "starts-of-stop-strings-are-shown",
        "toolkit/engine/front/output_processor.py",
        "range(min(len(text), len(stop) - 1), 0, -1)",
        "range(min(len(text), len(stop) - 2), 0, -1)",
        ("tests/engine/test_text.py",),
    ),
    Mutation(
        "engine",
        "moved-requests-start-again",
        "toolkit/engine/async_llm.py",
        "        output_token_ids=sequence.token_ids,\n",
        "",
        ("tests/engine/test_data_parallel.py", "tests/engine/test_async_llm.py"),
    ),
    Mutation(
        "engine",
        "failures-outlast-a-good-step",
        "toolkit/engine/core.py",
        "if num_sampled or not len(result.token_ids):",
        "if not len(result.token_ids):",
        ("tests/engine/test_failing_steps.py",),
    ),
    Mutation(
        "models",
        "layers-divide-by-the-previous-index",
        "toolkit/models/architectures/gpt2.py",
        "scale /= index + 1",
        "scale /= max(1, index)",
        ("tests/models/test_parity.py",),
    ),
    Mutation(
        "models",
        "fallback-ignores-windows",
        "toolkit/models/fallback/model.py",
        "sliding_window=call.window",
        "sliding_window=0",
        ("tests/models/test_fallback.py",),
    ),
    Mutation(
        "models",
        "norms-over-ranks-use-one-size",
        "toolkit/layers/norm.py",
        "squares / (group.size * len(weight)) + eps",
        "squares / len(weight) + eps",
        ("tests/distributed/test_tensor_parallel.py",),
    ),
    Mutation(
        "weights",
        "awq-order-is-not-inverted",
        "toolkit/weights/formats/awq.py",
        "places = [ORDER.index(place) for place in range(PER_WORD)]",
        "places = list(ORDER)",
        ("tests/weights/test_quantized_checkpoints.py",),
    ),
    Mutation(
        "weights",
        "minima-of-q4_1-are-negated",
        "toolkit/weights/gguf/decode.py",
        "return _Blocks(4, _spread(values, 16, (0, 4)), _fp16(scale), _fp16(minimum))",
        "return _Blocks(4, _spread(values, 16, (0, 4)), _fp16(scale), -_fp16(minimum))",
        ("tests/weights/test_gguf_decode.py",),
    ),
    Mutation(
        "weights",
        "missing-tensors-are-accepted",
        "toolkit/weights/loading/loader.py",
        "for name, slot in self._slots.items() if not slot.is_optional",
        "for name, slot in self._slots.items() if slot.is_optional",
        ("tests/weights/test_loading.py",),
    ),
    Mutation(
        "kernels",
        "decode-windows-are-one-too-long",
        "kernels/triton/attention/attention_kernels.py",
        "begin = tl.maximum(_first_key(first_query, window, CHUNKED), 0)",
        "begin = tl.maximum(_first_key(first_query, window, CHUNKED) - 1, 0)",
        ("tests/kernels/attention/test_decode_attention.py",),
    ),
    Mutation(
        "kernels",
        "top-p-counts-the-token-itself",
        "kernels/triton/sampling/sampling.py",
        "wanted = (logits >= least) & (logits > above)",
        "wanted = (logits >= least) & (logits >= above)",
        ("tests/kernels/sampling/test_sampling.py",),
    ),
    Mutation(
        "kernels",
        "all-groups-have-the-first-offset",
        "kernels/triton/products/grouped.py",
        "            offset = next_offset\n",
        "            offset = offset\n",
        ("tests/kernels/products/test_grouped.py",),
    ),
    Mutation(
        "speculative",
        "a-token-that-waits-is-lost",
        "toolkit/worker/drafter.py",
        "self._num_waiting[step.rows] = waiting\n",
        "self._num_waiting[step.rows] = waiting - 1\n",
        ("tests/speculative/test_draft_model.py",),
    ),
    Mutation(
        "speculative",
        "mtp-reads-its-inputs-swapped",
        "toolkit/speculative/eagle.py",
        "return embedding, hidden",
        "return hidden, embedding",
        ("tests/speculative/test_mtp.py",),
    ),
    Mutation(
        "speculative",
        "wrong-drafts-are-not-replaced",
        "kernels/triton/sampling/drafts.py",
        "mask=nth == count - 1",
        "mask=nth < count - 1",
        ("tests/speculative/test_gpu_runner.py",),
    ),
    Mutation(
        "executor",
        "strangers-are-accepted-as-ranks",
        "toolkit/executor/tcp_channel.py",
        "return int(rank) if hmac.compare_digest(proof, _proof(self.key, nonce, rank)) else -1",
        "return int(rank)",
        ("tests/executor/test_tcp_channel.py",),
    ),
    Mutation(
        "executor",
        "ranks-have-the-wrong-kv-head",
        "toolkit/distributed/shares.py",
        "group.rank // (group.size // total)",
        "group.rank % total",
        ("tests/distributed/test_tensor_parallel.py",),
    ),
    Mutation(
        "executor",
        "a-single-token-misses-the-next-stage",
        "toolkit/worker/batch_state.py",
        "if len(step.known_tokens):",
        "if len(step.known_tokens) > 1:",
        ("tests/distributed/test_pipeline_parallel.py",),
    ),
)
"""Three in each package that has behaviour to lose."""


if __name__ == "__main__":
    sys.exit(main())
