"""Pictures in the front end: processed once, loaded together, kept within limits."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from tests.pictures.samples import QWEN, data_url, gradient, saved
from toolkit.config.engine import PictureConfig
from toolkit.engine.front.feature_places import IMAGE, SOUND, content_of
from toolkit.engine.front.pictures import Picture, Pictures, PictureUrl
from toolkit.engine.front.pixels import PixelCache
from toolkit.errors import InvalidParamError
from toolkit.pictures.pool import Pixels
from toolkit.pictures.settings import PictureLimits
from toolkit.pictures.sources import Encoded
from toolkit.pictures.tokens import PictureTokens, TileTokens
from toolkit.worker.info import SightInfo

SIGHT = SightInfo(tokens=PictureTokens(placeholder=7), processor=QWEN, most_rows=4000, num_pages=9)
TILES = TileTokens(grid=(1, 2), cells=(((3,),), ((4, 4),)), last=(8,), alone=(2,), end=(1,))
URL, OTHER = (data_url(saved(gradient(*size))) for size in ((60, 60), (90, 60)))


class ManualPool:
    """Stands for `PicturePool`: a test finishes the work."""

    def __init__(self) -> None:
        self.measured: list[Future[tuple[int, int]]] = []
        self.processed: list[Future[Pixels]] = []

    def measure(self, encoded: Encoded, param: str) -> Future[tuple[int, int]]:
        self.measured.append(Future())
        return self.measured[-1]

    def process(self, encoded: Encoded, param: str) -> Future[Pixels]:
        self.processed.append(Future())
        return self.processed[-1]


@pytest.fixture
def pool() -> ManualPool:
    return ManualPool()


@pytest.fixture
def pictures(pool: Any) -> Pictures:
    return Pictures(SIGHT, PictureConfig(), pool, PictureLimits())


async def work(pool: ManualPool, *, measured: int, processed: int = 0) -> None:
    """Wait until the pool has so much work, and finish it."""
    while len(pool.measured) < measured or len(pool.processed) < processed:
        await asyncio.sleep(0)
    for one in pool.measured:
        if not one.done():
            one.set_result((60, 60))
    for number, other in enumerate(pool.processed):
        if not other.done():
            other.set_result(Pixels(60, 60, (1, 2, 2), (4,), "uint8", b"%d" % number))


async def resolve(pictures: Pictures, *urls: str, is_checked: bool = True) -> Any:
    named = [PictureUrl(url, f"picture {index}") for index, url in enumerate(urls)]
    return await pictures.resolve(named, is_checked=is_checked)


@pytest.mark.asyncio
async def test_a_new_picture_is_processed_once(pictures: Pictures, pool: ManualPool) -> None:
    """The core gets the pixels of the check. Later, only a core's wish is a reason."""
    asked = asyncio.ensure_future(resolve(pictures, URL))
    await work(pool, measured=1)
    await work(pool, measured=1, processed=1)
    [picture] = await asked
    assert picture.source().result() == b"0"
    [again] = await resolve(pictures, URL)
    assert (again.digest, len(pool.measured), len(pool.processed)) == (picture.digest, 1, 1)
    loading = again.source()
    await work(pool, measured=1, processed=2)
    assert loading.result() == b"1"


@pytest.mark.asyncio
async def test_tokens_are_known_without_processing(pictures: Pictures, pool: ManualPool) -> None:
    asked = asyncio.ensure_future(resolve(pictures, URL, is_checked=False))
    await work(pool, measured=1)
    assert [one.num_rows for one in await asked] == [4]
    assert pool.processed == []


@pytest.mark.asyncio
async def test_the_first_failure_cancels_the_others(pictures: Pictures, pool: ManualPool) -> None:
    asked = asyncio.ensure_future(resolve(pictures, URL, OTHER))
    while len(pool.measured) < 2:
        await asyncio.sleep(0)
    pool.measured[1].set_exception(InvalidParamError("picture 1", "is broken"))
    with pytest.raises(InvalidParamError, match=r"^picture 1 is broken$"):
        await asked
    assert pool.measured[0].cancelled()


@pytest.mark.asyncio
async def test_requests_share_the_work_on_a_picture(pictures: Pictures, pool: ManualPool) -> None:
    """The last of them cancels it. Errors have the parameter of each."""
    first, second = (asyncio.ensure_future(resolve(pictures, URL)) for _ in range(2))
    third = asyncio.ensure_future(resolve(pictures, OTHER, URL))
    while len(pool.measured) < 4:
        await asyncio.sleep(0)
    await work(pool, measured=4)
    for _ in range(9):  # let all of them ask
        await asyncio.sleep(0)
    shared, other = pool.processed
    first.cancel()
    await asyncio.wait([first])
    assert not shared.cancelled()
    shared.set_exception(InvalidParamError("", "is broken"))
    for asked, param in ((second, "picture 0"), (third, "picture 1")):
        with pytest.raises(InvalidParamError, match=f"^{param} is broken$"):
            await asked
    assert other.cancelled()


def test_pixels_beyond_the_limit_are_dropped() -> None:
    cache = PixelCache(max_bytes=10)
    for digest in (b"a", b"b", b"c"):
        cache.put(digest, digest * 4)
    assert [cache.pop(digest) for digest in (b"a", b"b", b"c", b"c")] == [
        None,
        b"bbbb",
        b"cccc",
        None,
    ]
    assert cache.is_decodable(b"a")
    cache.put(b"large", b"x" * 11)
    assert cache.pop(b"large") is None


@pytest.mark.parametrize(
    ("parts", "content"),
    [
        ([], ""),
        (["a", "", "b"], "a||b"),
        ([IMAGE], [{"type": "image"}]),
        (
            ["a", "b", IMAGE, SOUND, "c"],
            [
                {"type": "text", "text": "a|b"},
                {"type": "image"},
                {"type": "audio"},
                {"type": "text", "text": "c"},
            ],
        ),
    ],
)
def test_texts_between_pictures_are_joined(parts: list[Any], content: object) -> None:
    assert content_of(parts, "|") == content


@pytest.mark.parametrize(
    ("tokens", "grid", "ids", "runs"),
    [
        (PictureTokens(placeholder=7), (2, 2), [7] * 4, ((1, 4),)),
        (PictureTokens(placeholder=7, first=1), (1, 2), [7] * 3, ((1, 3),)),
        (PictureTokens(placeholder=7, row_end=8, end=9), (1, 1), [7, 9], ((1, 1),)),
        (
            PictureTokens(placeholder=7, row_end=8, end=9),
            (3, 2),
            [7, 7, 8, 7, 7, 8, 7, 7, 9],
            ((1, 2), (4, 2), (7, 2)),
        ),
        (PictureTokens(placeholder=7, tiles=TILES), (1, 2), [2, 7, 7, 1], ((2, 2),)),
        (
            PictureTokens(placeholder=7, tiles=TILES),
            (2, 2),
            [3, 7, 7, 4, 4, 7, 7, 8, 7, 7, 1],
            ((2, 2), (6, 2), (9, 2)),
        ),
        (
            PictureTokens(placeholder=7, tiles=TileTokens(grid=(1, 1), start=(2,), end=(3,))),
            (1, 2),
            [2, 7, 7, 7, 3],
            ((2, 3),),
        ),
        (
            PictureTokens(placeholder=7, tiles=TileTokens(grid=(1, 1), start=(2,), end=(3,))),
            (1, 1),
            [2, 7, 3],
            ((2, 1),),
        ),
    ],
)
def test_prompts_get_the_tokens_of_pictures(
    pool: Any, tokens: PictureTokens, grid: Any, ids: list[int], runs: Any
) -> None:
    """Prompts that have them already stay as they are."""
    sight = msgspec.structs.replace(SIGHT, tokens=tokens)
    pictures = Pictures(sight, PictureConfig(), pool, PictureLimits())
    encoded = Encoded(b"a", b"a")
    picture = Picture(encoded, grid, tokens.num_rows(grid), b"d", Future)
    for given in ([5, 7, 6], [5, *ids, 6]):
        found, (feature,) = pictures.expand(given, [picture])
        assert (found, feature.runs, feature.grid) == ([5, *ids, 6], runs, grid)
