"""Forms with a file: multipart bodies in any pieces, broken ones, and their limits."""

from __future__ import annotations

import asyncio
import itertools
import mmap
import tempfile
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace

import httpx
import pytest
from fastapi import APIRouter, Request
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import JSONResponse, Response

from toolkit.api import app as app_module
from toolkit.api.http import forms
from toolkit.api.http.forms import Form, FormLimits, read_form
from toolkit.api.http.layers import limits
from toolkit.api.http.layers.limits import BodyMemory, BodyTooLargeError
from toolkit.api.http.multipart import MAX_HEAD, MultipartParser, PartEnd, PartHead
from toolkit.api.http.routes import Access, access, takes_form
from toolkit.api.http.server import ServedModel, Server
from toolkit.api.http.streaming import ClientDisconnectedError
from toolkit.config import ServerConfig
from toolkit.errors import InvalidRequestError, ServerUnavailableError, ToolkitError
from toolkit.metrics import Metrics

TYPE = b"multipart/form-data; boundary=XX"
LIMITS = FormLimits(max_bytes=3 * 2**20)
DATA = b"RIFF\r\n--X\r\n--XY\r\n-\r\r\n\r\n--\n" * 20
Parts = list[tuple[PartHead, bytes]]


def body_of(*parts: tuple[bytes, bytes], end: bytes = b"--XX--\r\n") -> bytes:
    """Return a body of parts: headers and data."""
    return b"".join(b"--XX\r\n%s\r\n\r\n%s\r\n" % part for part in parts) + end


def head(name: str, filename: str | None = None) -> bytes:
    text = f'Content-Disposition: form-data; name="{name}"'
    return (text if filename is None else f'{text}; filename="{filename}"').encode()


NAME = head("a")
BODY = body_of(
    (head("file", "x.wav"), DATA),
    (b'content-disposition:form-data;name="model"', b"whisper"),
    (head("timestamp_granularities[]"), b"word"),
    (head("timestamp_granularities[]"), b"segment"),
    (head("empty") + b"\r\nContent-Type: text/plain", b""),
)


def parse(pieces: list[bytes], content_type: bytes = TYPE) -> Parts:
    """Return the parts of a body that comes in pieces. Raises InvalidRequestError."""
    parser = MultipartParser(content_type)
    parts: list[tuple[PartHead, bytearray]] = []
    num_ended = 0
    for piece in pieces:
        for found in parser.feed(piece):
            if isinstance(found, PartHead):
                parts.append((found, bytearray()))
            elif isinstance(found, PartEnd):
                num_ended += 1
            else:
                parts[-1][1].extend(found)
    parser.finish()
    assert num_ended == len(parts)
    return [(head, bytes(data)) for head, data in parts]


def split(body: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    return [body[start:stop] for start, stop in itertools.pairwise(edges)]


# ---- the parser


def test_parts_have_their_names_and_data():
    assert parse([BODY]) == [
        (PartHead("file", "x.wav"), DATA),
        (PartHead("model", None), b"whisper"),
        (PartHead("timestamp_granularities[]", None), b"word"),
        (PartHead("timestamp_granularities[]", None), b"segment"),
        (PartHead("empty", None), b""),
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_small_pieces_give_the_same_parts(size: int):
    pieces = [BODY[start : start + size] for start in range(0, len(BODY), size)]
    assert parse(pieces) == parse([BODY])


@given(st.lists(st.integers(0, len(BODY)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_pieces_of_any_length_give_the_same_parts(cuts: list[int]):
    assert parse(split(BODY, cuts)) == parse([BODY])


@given(
    st.lists(st.tuples(st.integers(0, len(BODY)), st.binary(max_size=3)), max_size=4),
    st.lists(st.integers(0, len(BODY)), max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_broken_body_is_an_error_or_other_parts(edits: list[tuple[int, bytes]], cuts: list[int]):
    body = bytearray(BODY)
    for place, text in edits:
        body[place : place + 2] = text

    def outcome(pieces: list[bytes]) -> Parts | str:
        try:
            return parse(pieces)
        except InvalidRequestError as error:
            return type(error).__name__

    assert outcome(split(bytes(body), cuts)) == outcome([bytes(body)])


def test_parser_holds_little():
    parser = MultipartParser(TYPE)
    parser.feed(b"--XX\r\n" + NAME + b"\r\n\r\n")
    num_found = 0
    for number in range(1, 100):
        num_found += sum(len(one) for one in parser.feed(b"\r\n--X" * 200) if type(one) is bytes)
        assert num_found > 1000 * number - 16


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b'form-data; name="a"; filename="b \\"c\\".wav"', PartHead("a", 'b "c".wav')),
        (b'form-data; name="a"; filename="C:\\x\\y.wav"', PartHead("a", "C:\\x\\y.wav")),
        (b"FORM-DATA ; NAME=a;filename=b", PartHead("a", "b")),
        (b'form-data; filename="";name="a;b=c"', PartHead("a;b=c", "")),
        ('form-data; name="ü"; filename="ß"'.encode(), PartHead("ü", "ß")),
        (b'form-data; name="a"; filename*=UTF-8\'\'b', PartHead("a", "UTF-8''b")),
        (b'form-data; name="\xff"', PartHead("\ufffd", None)),
    ],
)  # fmt: skip
def test_names_are_read_as_clients_write_them(header: bytes, expected: PartHead):
    assert parse([body_of((b"Content-Disposition: " + header, b"x"))]) == [(expected, b"x")]


@pytest.mark.parametrize(
    "body",
    [
        b"\r\n" + BODY,
        b"\r\n\r\n" + BODY,
        BODY + b"epilogue" * 10_000,
        BODY.replace(b"--XX\r\n", b"--XX \t\r\n"),
        BODY.removesuffix(b"\r\n"),
    ],
    ids=["newline", "newlines", "epilogue", "padding", "no newline"],
)
def test_variants_of_a_body_give_the_same_parts(body: bytes):
    assert parse([body]) == parse([body[:20], body[20:]]) == parse([BODY])


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "is truncated"),
        (BODY[:-6], "is truncated"),
        (BODY[:300], "is truncated"),
        (b"hello" + BODY, "does not begin with the boundary"),
        (body_of((NAME, b""), end=b"--XXX\r\n"), "a boundary that is not alone in its line"),
        (body_of((NAME, b""), end=b"--XX" + b" " * 100), "is not alone in its line"),
        (body_of((b"X: y", b"")), "a part without 'Content-Disposition: form-data; name=...'"),
        (body_of((b"Content-Disposition: form-data", b"")), "a part without"),
        (body_of((b'Content-Disposition: attachment; name="a"', b"")), "a part without"),
        (body_of((b"name", b"")), "a header without a colon: 'name'"),
        (body_of((NAME + b"\r\nx: " + b"y" * MAX_HEAD, b"")), "more than 8,192 bytes of headers"),
        (b"--XX\r\n" + b"y" * MAX_HEAD, "more than 8,192 bytes of headers"),
        (body_of(*[(NAME, b"")] * 65), "has more than 64 parts"),
        (
            body_of((NAME + b"\r\nContent-Transfer-Encoding: base64", b"")),
            "a has the Content-Transfer-Encoding 'base64'",
        ),
    ],
)
def test_broken_body_is_refused(body: bytes, problem: str):
    with pytest.raises(InvalidRequestError, match=problem.replace("(", r"\(")):
        parse([body])


@pytest.mark.parametrize(
    ("content_type", "problem"),
    [
        (b"", "must be multipart/form-data"),
        (b"application/json", "its Content-Type is 'application/json'"),
        (b"multipart/mixed; boundary=XX", "must be multipart/form-data"),
        (b"multipart/form-data", "without a valid boundary"),
        (b'multipart/form-data; boundary="a\xff"', "without a valid boundary"),
        (b"multipart/form-data; boundary=" + b"a" * 201, "without a valid boundary"),
    ],
)
def test_wrong_content_type_is_refused(content_type: bytes, problem: str):
    with pytest.raises(InvalidRequestError, match=problem):
        MultipartParser(content_type)


# ---- forms


async def receive_form(
    body: bytes, limits: FormLimits = LIMITS, *, step: int = 2**16, length: int | None = None
) -> Form:
    """Read the form of a request whose body comes in pieces; its end is lost if `step` is 0."""
    pieces = [body[start : start + step] for start in range(0, len(body), step)] if step else []

    async def receive() -> dict[str, object]:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": True}
        return {"type": "http.request" if step else "http.disconnect"}

    headers = [(b"content-type", TYPE)]
    if length is not None:
        headers.append((b"content-length", b"%d" % length))
    with BodyMemory().body() as incoming:
        scope = {"type": "http", "headers": headers, "state": {"body": incoming}}
        return await read_form(Request(scope, receive), limits)


def with_file(data: bytes, *others: tuple[bytes, bytes]) -> bytes:
    return body_of((head("file", "x.wav"), data), *others)


async def test_form_has_fields_and_the_file():
    form = await receive_form(BODY)
    assert form.fields == {
        "model": ["whisper"],
        "timestamp_granularities[]": ["word", "segment"],
        "empty": [""],
    }
    assert (form.file.name, form.file.size, form.file.data) == ("x.wav", len(DATA), DATA)


async def test_large_file_is_on_disk():
    data = bytes(range(256)) * 2**13
    file = (await receive_form(with_file(data, (NAME, b"1")), step=10_007)).file
    assert isinstance(file.data, mmap.mmap)
    assert file.data[:] == data


async def test_full_disk_is_reported(monkeypatch: pytest.MonkeyPatch):
    def fail(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    with pytest.raises(ServerUnavailableError, match=r"stored in .*: No space left on device\."):
        await receive_form(with_file(bytes(2**21)))


@pytest.mark.parametrize(
    ("body", "param", "problem"),
    [
        (body_of((NAME, b"x")), "file", "file is missing."),
        (with_file(b"x", (head("file"), b"y")), "file", "in the form twice"),
        (with_file(b"x", (NAME, b"y" * 2**17)), "a", "a has more than 65,536 bytes"),
        (
            body_of((head("a", "x.wav"), b"y" * 2**17)),
            "a",
            "a is a file; the file must be in the field 'file'",
        ),
        (with_file(b"x", *[(NAME, b"y" * 60_000)] * 20), None, "more than 1,048,576 bytes without"),
        (with_file(b"x", (NAME, b"y\xff")), "a", "a is not valid UTF-8: 0xff at byte 2"),
    ],
)
async def test_wrong_form_is_refused(body: bytes, param: str | None, problem: str):
    with pytest.raises(InvalidRequestError, match=problem.replace(".", r"\.")) as refused:
        await receive_form(body)
    assert refused.value.param == param


@pytest.mark.parametrize("length", [None, 2**30])
async def test_file_beyond_the_limit_is_refused(length: int | None):
    """From the declared length, before the body, or while it arrives."""
    body = b"" if length else with_file(bytes(4 * 2**20))
    with pytest.raises(BodyTooLargeError, match=r"larger than 3 MiB.*--max-audio-mb") as refused:
        await receive_form(body, length=length)
    assert (refused.value.status, refused.value.param) == (413, "file")


async def test_client_that_disconnects_ends_the_form():
    with pytest.raises(ClientDisconnectedError):
        await receive_form(BODY, step=0)


async def test_memory_of_files_is_limited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "MAX_BODIES", 2**19)
    assert (await receive_form(with_file(bytes(2**18)))).file.size == 2**18
    with pytest.raises(ToolkitError, match="memory for bodies"):
        await receive_form(with_file(bytes(2**20)))


async def test_slow_form_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forms, "FORM_TIMEOUT", 0.05)

    async def receive() -> dict[str, object]:
        await asyncio.sleep(60)
        return {}

    with BodyMemory().body() as incoming:
        scope = {"type": "http", "headers": [(b"content-type", TYPE)], "state": {"body": incoming}}
        with pytest.raises(ToolkitError, match=r"did not arrive within 0\.05 s"):
            await read_form(Request(scope, receive), LIMITS)


# ---- through the server's layers


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server with a route of forms, and no engine."""
    router = APIRouter()

    @router.post("/form")
    @access(Access.MODEL_WORK)
    @takes_form
    async def form(request: Request) -> Response:
        found = await read_form(request, LIMITS)
        return JSONResponse({"size": found.file.size, "fields": found.fields})

    monkeypatch.setattr(app_module, "ROUTERS", [*app_module.ROUTERS, router])
    engine = SimpleNamespace(
        metrics=Metrics("tk", "x"), num_waiting=0, num_waiting_tokens=0, max_num_running=1,
        stats=SimpleNamespace(num_running=0),
    )  # fmt: skip
    app = app_module.make_app(Server(ServerConfig(), [ServedModel(engine, ("x",))]))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as found:
        yield found


async def test_limits_of_json_do_not_hold_for_forms(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "MAX_BODY", 2**20)
    brackets = b"[" * 2**21
    answer = await client.post("/form", files={"file": brackets}, data={"a": ["1", "2"]})
    assert answer.json() == {"size": 2**21, "fields": {"a": ["1", "2"]}}
    assert (await client.post("/v1/completions", content=brackets)).status_code == 413


async def test_pieces_of_unknown_length_are_read(client: httpx.AsyncClient):
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(BODY), 50):
            yield BODY[start : start + 50]

    answer = await client.post("/form", content=pieces(), headers={"Content-Type": TYPE.decode()})
    assert answer.json()["size"] == len(DATA)


@pytest.mark.parametrize(
    ("request_", "status", "param"),
    [
        ({"files": {"file": bytes(2**22)}}, 413, "file"),
        ({"files": {"other": b"x"}}, 400, "file"),
        ({"json": {"file": "x"}}, 400, None),
    ],
)
async def test_errors_of_forms_are_those_of_openai(
    client: httpx.AsyncClient, request_: dict, status: int, param: str | None
):
    answer = await client.post("/form", **request_)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert error["type"] == "invalid_request_error"


@pytest.fixture(autouse=True)
def _no_files_left(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that no temporary file has a name, which a crash would leave."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []
