"""URLs of pictures, files in a folder, and the bytes that a server holds."""

from __future__ import annotations

import asyncio
import gc
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.pictures.samples import data_url, gradient
from toolkit.errors import InvalidRequestError, ServerUnavailableError
from toolkit.pictures import sources
from toolkit.pictures.settings import PictureLimits
from toolkit.pictures.sources import (
    DataUrl,
    FileUrl,
    HttpUrl,
    from_image,
    load,
    parse_url,
)

LIMITS = PictureLimits()


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("data:image/png;base64,QUJD", DataUrl("QUJD")),
        ("data:;base64,QUJD", DataUrl("QUJD")),
        ("DATA:image/svg+xml;charset=utf-8;BASE64,QU,JD", DataUrl("QU,JD")),
        ("data:image/png;base64,", DataUrl("")),
        ("http://a.b/c", HttpUrl("http://a.b/c")),
        ("HTTPS://a.b/c", HttpUrl("HTTPS://a.b/c")),
        ("file:///a/b%20c.png", FileUrl("/a/b c.png")),
        ("file://localhost/a", FileUrl("/a")),
    ],
)
def test_url_is_parsed(url: str, parsed: object) -> None:
    assert parse_url(url, "here") == parsed


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "here must be a data: URL with base64, an http(s): URL or a file: URL, not ''"),
        ("cat.png", "not 'cat.png'"),
        ("/etc/passwd", "not '/etc/passwd'"),
        ("ftp://a.b/c", "not 'ftp://a.b/c'"),
        ("javascript:alert(1)", "not 'javascript:alert(1)'"),
        (" http://a.b/", "not ' http://a.b/'"),
        ("x" * 10**6, "not '" + "x" * 57 + "...'"),
        ("data:image/png,abc", "without base64: its beginning is 'data:image/png,'"),
        ("data:image/png;base64;x,abc", "without base64"),
        ("data:image/png;base64", "is a data URL without a comma"),
        ("data:" + "x" * 10**6 + ";base64,QUJD", "is a data URL without a comma"),
        ("http://a.b/" + "x" * 9000, "has 9011 characters; at most 8192 are allowed"),
        ("file://host/a", "must have the form file:///absolute/path"),
        ("file:a/b", "must have the form file:///absolute/path"),
        ("file://[/a", "is not a valid URL"),
    ],
)
def test_wrong_url_is_an_error(url: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_url(url, "here")
    assert words in caught.value.message
    assert caught.value.param == "here"


async def digest(url: str) -> bytes:
    return (await load(url, LIMITS, "here")).digest


async def test_equal_data_have_equal_digests() -> None:
    small, large = "data:image/png;base64,QUJD", "data:;base64," + "QUJD" * 10**6
    assert await digest(small) == await digest(small.replace("png", "gif"))
    assert await digest(large) == await digest(large)
    assert len({await digest(small), await digest(large), await digest(large + "QUJD")}) == 3
    assert len(await digest(small)) == 16


def test_digest_of_an_image_has_its_size() -> None:
    images = [gradient(6, 4), gradient(6, 4), Image.new("RGB", (2, 3)), Image.new("RGB", (3, 2))]
    same, other, wide, high = (from_image(image).digest for image in images)
    assert same == other
    assert wide != high


def test_image_is_not_changed() -> None:
    image = gradient(6, 4, "RGBA")
    before = image.copy()
    encoded = from_image(image)
    assert image == before
    assert encoded.raw_size == (6, 4)
    assert len(encoded.data) == 6 * 4 * 3


async def test_data_url_that_is_too_long_is_an_error() -> None:
    limits = PictureLimits(max_bytes=1000)
    with pytest.raises(InvalidRequestError, match=r"2,004 characters of base64; at most 1,000"):
        await load("data:;base64," + "QUJD" * 501, limits, "here")


async def test_bytes_of_all_pictures_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    # A server of an earlier test may still have pictures.
    monkeypatch.setattr(sources._Hold, "_total", 0)
    monkeypatch.setattr(sources._Hold, "_released", deque())
    limits = PictureLimits(bytes_in_flight=10_000)
    urls = [data_url(bytes([number]) * 3000) for number in range(3)]
    held = [await load(url, limits, "here") for url in urls[:2]]
    with pytest.raises(ServerUnavailableError, match=r"have 8,000 bytes; .* 4,000 would exceed"):
        await load(urls[2], limits, "here")
    assert ServerUnavailableError.status == 503
    held.pop()
    held.append(await load(urls[2], limits, "here"))
    held.clear()
    assert await load(data_url(bytes(6000)), limits, "here")


async def test_errors_do_not_hold_bytes(folder: Path) -> None:
    limits = PictureLimits(bytes_in_flight=10_000, max_bytes=1000, local_folder=str(folder))
    gc.collect()
    for _ in range(20):
        with pytest.raises(InvalidRequestError, match="is a file of 1,001 bytes"):
            await load(f"file://{folder}/large.png", limits, "here")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of pictures, next to a secret."""
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "pictures-of-others").mkdir()
    (tmp_path / "pictures-of-others" / "cat.png").write_bytes(b"secret")
    folder = tmp_path / "pictures"
    (folder / "inner").mkdir(parents=True)
    (folder / "cat.png").write_bytes(b"cat")
    (folder / "inner" / "dog and cat.png").write_bytes(b"dog")
    (folder / "large.png").write_bytes(bytes(1001))
    (folder / "link.png").symlink_to(tmp_path / "secret")
    (folder / "inner link.png").symlink_to("cat.png")
    (folder / "outer").symlink_to(tmp_path)
    os.mkfifo(folder / "fifo.png")
    yield folder
    os.close(os.open(folder / "fifo.png", os.O_RDWR))  # a thread that waits for it would go on


async def read(folder: Path | str, url: str) -> bytes | str:
    limits = PictureLimits(local_folder=str(folder), max_bytes=1000)
    async with asyncio.timeout(10):
        return (await load(url, limits, "here")).data


async def test_files_below_the_folder_are_read(folder: Path) -> None:
    assert await read(folder, f"file://{folder}/cat.png") == b"cat"
    assert await read(folder, f"file://localhost{folder}/inner/dog%20and%20cat.png") == b"dog"
    assert await read(f"{folder}/", f"file://{folder}//inner/./dog%20and%20cat.png") == b"dog"


async def test_folder_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    for name in ("link", "pictures"):
        assert await read(tmp_path / "link", f"file://{tmp_path / name}/cat.png") == b"cat"


OUTSIDE = "is a file: URL outside the folder that this server reads"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/../secret", OUTSIDE),
        ("/inner/../../secret", OUTSIDE),
        ("/%2e%2e/secret", OUTSIDE),
        ("/..%2fsecret", OUTSIDE),
        ("-of-others/cat.png", OUTSIDE),
        ("/cat.png%00.png", OUTSIDE),
        ("", OUTSIDE),
        ("/link.png", "cannot be read: "),
        ("/inner%20link.png", "cannot be read: "),
        ("/outer/secret", "cannot be read: "),
        ("/none.png", "cannot be read: No such file or directory"),
        ("/cat.png/x", "cannot be read: "),
        ("/fifo.png", "is a file: URL of something that is not a regular file"),
        ("/inner", "is a file: URL of something that is not a regular file"),
        ("/large.png", "is a file of 1,001 bytes; at most 1,000 are allowed"),
    ],
)
async def test_no_other_file_is_read(folder: Path, path: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await read(folder, f"file://{folder}{path}")
    assert words in caught.value.message
    assert caught.value.param == "here"


@pytest.mark.parametrize("url", ["file:///etc/passwd", "file:///proc/self/environ", "file:///"])
async def test_files_elsewhere_are_not_read(folder: Path, url: str) -> None:
    with pytest.raises(InvalidRequestError, match=OUTSIDE):
        await read(folder, url)


async def test_no_file_is_read_by_default() -> None:
    with pytest.raises(InvalidRequestError, match=r"this server reads none; send the picture in"):
        await load("file:///etc/passwd", LIMITS, "here")


async def test_no_url_is_fetched_by_default() -> None:
    with pytest.raises(InvalidRequestError, match=r"this server downloads none"):
        await load("http://127.0.0.1/", LIMITS, "here")
