"""Servers for the tests that share one, and a reference: the same model in Transformers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests import checkpoints
from tests.local import LocalServer
from tests.server import Server, shared

CONTEXT = 8192
"""Context of the models, in tokens: long enough that an endless request runs for many seconds."""

SMALL_TOKENS = 160
SMALL = (10 * 2 * 2 * 16 * 2 * 8 * 4 + 100) / 2**30
"""GiB of ten blocks: 2 (K, V) · 2 layers · 16 tokens · 2 heads · 8 values · 4 bytes, and a bit."""


class Reference:
    """The served model in Transformers."""

    def __init__(self) -> None:
        self.model = checkpoints.make_reference("llama3-gqa")
        self.tokenizer = checkpoints.make_tokenizer()
        self._tokens: dict[str, list[int]] = {}  # the longest known answer of each prompt

    def tokens(self, prompt: str, count: int) -> tuple[int, ...]:
        """Greedy tokens of a prompt. Shorter answers are prefixes of longer ones."""
        self._generate([prompt], count)
        return tuple(self._tokens[prompt][:count])

    def text(self, prompt: str, count: int) -> str:
        return self.texts([prompt], count)[0]

    def texts(self, prompts: list[str], count: int) -> list[str]:
        self._generate(prompts, count)
        answers = [self._tokens[prompt][:count] for prompt in prompts]
        return self.tokenizer.batch_decode(answers, skip_special_tokens=True)

    def _generate(self, prompts: list[str], count: int) -> None:
        """Generate answers that are too short. Prompts of equal length run in one batch."""
        new: dict[int, dict[str, list[int]]] = defaultdict(dict)
        for prompt in prompts:
            if len(self._tokens.get(prompt, [])) < count:
                ids = self.tokenizer.encode(prompt, add_special_tokens=False)
                new[len(ids)][prompt] = ids
        for batch in new.values():
            length = -(-count // 48) * 48
            answers = checkpoints.greedy_batch(self.model, list(batch.values()), length)
            self._tokens.update(zip(batch, answers, strict=True))

    def conversation(self, *messages: dict[str, str]) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="session")
def model(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model with a context of CONTEXT tokens."""
    folder = checkpoints.save(reference.model, tmp_path_factory.mktemp("models") / "tiny-llama")
    checkpoints.edit_json(folder / "config.json", max_position_embeddings=CONTEXT)
    return folder


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The shared server, in this process. Tests leave it idle and healthy."""
    names = ("--served-model-name", "tiny", "org/other/name")
    arguments = (str(model), *names, "--num-gpu-blocks-override", "4096")
    yield from shared("server", lambda: LocalServer(*arguments, cwd=tmp_path_factory.mktemp("cwd")))


@pytest.fixture(scope="session")
def two_workers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server like the shared one with two API workers, whose steps verify drafts.

    Tests leave it idle and healthy."""
    served = Server(
        str(model),
        *("--served-model-name", "tiny", "--num-gpu-blocks-override", "4096"),
        *("--api-workers", "2"),
        *("--speculative-config", '{"method": "ngram"}'),
        cwd=tmp_path_factory.mktemp("two"),
    )
    yield served
    served.await_health()
    served.stop()


@pytest.fixture(scope="session")
def base(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without --served-model-name and with SMALL GiB of KV cache.

    The tokenizer is in another folder, without a chat template. A line break is an EOS token, too.
    """
    yield from shared("base", lambda: start_base(reference, tmp_path_factory.mktemp("models")))


def start_base(reference: Reference, parent: Path) -> Server:
    folder = checkpoints.save(reference.model, parent / "base", tokenizer=False)
    checkpoints.edit_json(folder / "config.json", max_position_embeddings=CONTEXT)
    line_break = reference.tokenizer.encode("\n")
    checkpoints.edit_json(
        folder / "generation_config.json", eos_token_id=[checkpoints.EOS, *line_break]
    )
    reference.tokenizer.save_pretrained(parent / "tokenizer")
    (parent / "tokenizer" / "chat_template.jinja").unlink()
    return LocalServer(
        str(folder),
        *("--kv-cache-memory", str(SMALL), "--max-model-len", str(SMALL_TOKENS)),
        *("--tokenizer", str(parent / "tokenizer"), "--metrics-prefix", "vllm"),
        cwd=parent,
    )


@pytest.fixture
def http(server: Server) -> httpx.Client:
    return server.http


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


@pytest.fixture(scope="session")
def bare_model(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the same model without a tokenizer. It starts faster, and takes token ids."""
    folder = checkpoints.save(
        reference.model, tmp_path_factory.mktemp("models") / "bare", tokenizer=False
    )
    checkpoints.edit_json(folder / "config.json", max_position_embeddings=CONTEXT)
    return folder


@pytest.fixture
def start(bare_model: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts a server for one test: `start("--flag", ..., NAME="value")`."""
    yield from _starter(Server, bare_model, tmp_path)


@pytest.fixture
def start_local(bare_model: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts a server in this process for one test."""
    yield from _starter(LocalServer, bare_model, tmp_path)


def _starter(kind: type[Server], bare_model: Path, cwd: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(*arguments: str, model: Path = bare_model, **environment: str) -> Server:
        started.append(kind(str(model), *arguments, cwd=cwd, **environment))
        return started[-1]

    yield start
    for server in started:
        server.stop()
