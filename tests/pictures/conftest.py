"""Pools of workers that the tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pictures.samples import QWEN
from toolkit.pictures.pool import PicturePool
from toolkit.pictures.settings import PictureLimits

LIGHT_PROCESSOR = '''
import os, time

class Qwen2VLImageProcessorPil:
    """Returns the pixels as they are, and takes no time to import. Some heights are special."""
    def __init__(self, size, **_):
        if "sides" in size:
            raise ValueError("the size has sides")
        time.sleep(size.get("seconds", 0))
    def __call__(self, images, **_):
        height = images[0].shape[0]
        if height == 11:
            bytes(2**33)
        if height == 10:
            raise KeyError("a bug")
        if height == 14:
            self.kept = b"x" * 2**27
        if height == 12:
            os.abort()
        while height == 13:
            pass
        if height == 16:
            return {"image_grid_thw": [[len(os.environ)]], "pixel_values": images[0]}
        return {"image_grid_thw": [[1, 1, 1]], "pixel_values": images[0].reshape(-1, 3)}
'''


@pytest.fixture(scope="session")
def pool() -> Iterator[PicturePool]:
    """A pool with the default limits and Transformers' processor."""
    pool = PicturePool(QWEN, PictureLimits())
    pool.start()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def light_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH of processes with an image processor in the place of Transformers."""
    root = tmp_path_factory.mktemp("light")
    folder = root / "transformers" / "models" / "qwen2_vl"
    folder.mkdir(parents=True)
    for package in (folder, *folder.parents[:2]):
        (package / "__init__.py").touch()
    (folder / "image_processing_pil_qwen2_vl.py").write_text(LIGHT_PROCESSOR)
    return f"{root}{os.pathsep}{Path(__file__).parents[2]}"


@pytest.fixture
def light_pool(
    light_path: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., PicturePool]]:
    """Return a function that starts a pool for one test; its arguments are limits."""
    monkeypatch.setenv("PYTHONPATH", light_path)
    pools = []

    def start(**limits: object) -> PicturePool:
        pools.append(PicturePool(QWEN, PictureLimits(**limits)))
        pools[-1].start()
        return pools[-1]

    yield start
    for one in pools:
        one.close()
