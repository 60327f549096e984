"""Pictures in chats, with the official client, compared with the offline engine."""

from __future__ import annotations

import base64
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from tests import seeing
from tests.api.conftest import Server
from tests.local import LocalServer
from tests.pictures.samples import data_url, gradient, saved
from toolkit import LLM, SamplingParams

TOKENS = 8
WIDE, TALL = gradient(44, 30), gradient(30, 44)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing.save(tmp_path_factory.mktemp("models") / "seeing")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    served = LocalServer(
        str(folder),
        *("--served-model-name", "tiny", "--num-gpu-blocks-override", "300"),
        *("--limit-mm-per-prompt", "image=3"),
        cwd=folder.parent,
    )
    yield served
    served.await_health()
    served.stop()


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    llm = LLM(str(folder), device="cpu", num_threads=1, num_gpu_blocks_override=300)
    yield llm
    llm.shutdown()


@functools.cache
def url_of(size: tuple[int, int]) -> str:
    return data_url(saved(gradient(*size)))


def image_url(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(image.size)}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def expected(llm: LLM, prompt: str, *images: Image.Image) -> str:
    """Answer a rendered prompt whose places for pictures are <I>."""
    place = [seeing.VISION_START, seeing.IMAGE, seeing.VISION_END]
    ids = [seeing.START, *llm.tokenize("user\n")]
    for index, one in enumerate(prompt.split("<I>")):
        ids += (place if index else []) + llm.tokenize(one)
    ids += [seeing.END, *llm.tokenize("\n"), seeing.START, *llm.tokenize("assistant\n")]
    given = {"prompt_token_ids": ids, "multi_modal_data": {"image": list(images)}}
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    return llm.generate(given, params, use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize(
    ("content", "prompt", "images"),
    [
        ([text("a"), image_url(WIDE), text("b")], "a<I>b", [WIDE]),
        ([image_url(TALL), image_url(WIDE)], "<I><I>", [TALL, WIDE]),
    ],
)
def test_answer_is_that_of_the_engine(
    server: Server, llm: LLM, content: list[Any], prompt: str, images: list[Image.Image]
) -> None:
    with server.openai() as client:
        done = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": content}],
            max_tokens=TOKENS,
            temperature=0.0,
            extra_body={"ignore_eos": True},
        )
    assert done.choices[0].message.content == expected(llm, prompt, *images)
