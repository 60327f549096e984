"""Downloads of pictures: from allowed domains only, and never from this network."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import trustme

from toolkit.errors import ConfigError, InvalidRequestError, ServerUnavailableError
from toolkit.pictures.addresses import NetworkPolicy, is_public
from toolkit.pictures.fetch import fetch, parse_domain
from toolkit.pictures.settings import PictureLimits

PICTURE = b"\x89PNG of a cat"


@dataclass
class Site:
    """A server on 127.0.0.1 that answers with `answers`, by path, as they are."""

    port: int = 0
    answers: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    pause: float = 0.0  # seconds between two bytes

    async def start(self, context: ssl.SSLContext | None = None) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(request)
            data = self.answers[request.split(" ")[1]]
            step = 1 if self.pause else len(data)
            for start in range(0, len(data), max(step, 1)):
                writer.write(data[start : start + step])
                await writer.drain()
                await asyncio.sleep(self.pause)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def answer(body: bytes = PICTURE, status: str = "200 OK", **headers: str) -> bytes:
    headers = {"Content_Type": "text/html", "Content_Length": str(len(body))} | headers
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items() if value]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode() + body


def redirect(location: str, status: str = "302 Found") -> bytes:
    return answer(b"", status, Location=location)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site(answers={"/cat.png": answer()})
    async with await site.start():
        yield site


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
async def secure_site(authority: trustme.CA) -> AsyncIterator[Site]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("pictures.test").configure_cert(context)
    site = Site(answers={"/cat.png": answer()})

    def note_name(_: object, name: str | None, __: object) -> None:
        site.names.append(name)

    context.sni_callback = note_name
    async with await site.start(context):
        yield site


def resolver(*answers: list[str]) -> Callable[[str, int], Any]:
    """Return a resolver with one answer after the other; the last is repeated."""
    left = list(answers)

    async def resolve(host: str, port: int) -> list[str]:
        return left.pop(0) if len(left) > 1 else left[0]

    return resolve


def policy(*answers: list[str], **options: Any) -> NetworkPolicy:
    """Allow 127.0.0.1, where the tests' server is, in addition to public addresses."""
    return NetworkPolicy(
        resolver(*(answers or (["127.0.0.1"],))),
        lambda address: address == "127.0.0.1" or is_public(address),
        **options,
    )


def limits(*domains: str, **options: Any) -> PictureLimits:
    return PictureLimits(allowed_domains=domains, **options)


async def download(url: str, *domains: str, policy: NetworkPolicy, **options: Any) -> bytes:
    return await fetch(url, limits(*domains, **options), "here", lambda count: None, policy)


async def problem(url: str, *domains: str, policy: NetworkPolicy, **options: Any) -> str:
    """Return the message of the error."""
    with pytest.raises(InvalidRequestError) as caught:
        await download(url, *domains, policy=policy, **options)
    assert caught.value.param == "here"
    return caught.value.message


PRIVATE = """
0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 100.127.255.254 127.0.0.1 127.8.8.8 169.254.169.254 172.16.0.1
172.31.255.255 192.0.0.8 192.0.2.1 192.168.1.1 192.88.99.1 198.18.0.1 198.51.100.1 203.0.113.9
224.0.0.1 239.255.255.250 240.0.0.1 255.255.255.255 :: ::1 ::127.0.0.1 ::8.8.8.8 ::ffff:127.0.0.1
::ffff:10.0.0.1 ::ffff:7f00:1 ::ffff:169.254.169.254 64:ff9b::127.0.0.1 64:ff9b::10.0.0.1
64:ff9b::a9fe:a9fe 64:ff9b:1::8.8.8.8 2002:7f00:1:: 2002:808:808:: 2001:0:7f00:1:: 2001:db8::1
3fff::1 4000::1 fc00::1 fd12:3456::1 fe80::1 fe80::1%eth0 2606:4700::1%1 fec0::1 ff02::1 100::1
localhost 127.1 0x7f.0.0.1 2130706433
""".split()  # noqa: SIM905


@pytest.mark.parametrize("address", PRIVATE)
def test_address_that_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "100.63.0.1", "172.32.0.1", "2606:4700::1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"],
)
def test_address_that_is_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("entry", "url"),
    [
        ("example.com", "http://example.com/x"),
        ("example.com", "https://EXAMPLE.com/x"),
        ("Example.com", "https://example.com:443/x"),
        ("example.com", "http://example.com:80/x"),
        ("example.com:8080", "http://example.com:8080/x"),
        (".example.com", "http://a.example.com/x"),
        (".example.com", "http://b.a.example.com/x"),
        (".example.com:81", "http://a.example.com:81/x"),
        ("bücher.example", "http://xn--bcher-kva.example/x"),
        ("xn--bcher-kva.example", "http://bücher.example/x"),
        ("8.8.8.8", "http://8.8.8.8/x"),
        ("[2606:4700::1]:81", "http://[2606:4700::1]:81/x"),
    ],
)
async def test_allowed_domain_is_resolved(entry: str, url: str) -> None:
    assert "address is not public" in await problem(url, entry, policy=policy(["10.0.0.1"]))


@pytest.mark.parametrize(
    ("entry", "url"),
    [
        ("example.com", "http://a.example.com/x"),
        ("example.com", "http://evilexample.com/x"),
        ("example.com", "http://example.com.evil.org/x"),
        ("example.com", "http://evil.org/example.com"),
        ("example.com", "http://evil.org#example.com"),
        ("example.com", "http://evil.org?example.com"),
        ("example.com", "http://evil.org\\@example.com/x"),
        ("example.com", "http://example.com./x"),
        (".example.com", "http://example.com/x"),
        (".example.com", "http://evilexample.com/x"),
        ("example.com", "http://example.com:8080/x"),
        ("example.com", "http://example.com:22/x"),
        ("example.com:8080", "http://example.com/x"),
        ("example.com:8080", "http://example.com:8081/x"),
        ("example.com", "http://127.0.0.1/x"),
        ("example.com", "http://[::1]/x"),
        ("example.com", "http://%65xample.com/x"),
        ("example.com", "http:///x"),
    ],
)
async def test_other_domains_and_ports_are_refused(entry: str, url: str) -> None:
    message = await problem(url, entry, policy=policy())
    assert "not among those that this server downloads" in message or "user name" in message


async def test_nothing_is_downloaded_by_default() -> None:
    message = await problem("http://example.com/x", policy=policy())
    assert "this server downloads none; send the picture in a data: URL" in message


@pytest.mark.parametrize("entry", ["", ".", "http://example.com", "a/b", "*.example.com", "a@b"])
def test_wrong_entry_is_an_error(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"an entry is like example\.com"):
        parse_domain(entry)


async def test_picture_is_downloaded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    site.answers["/a%20b?q=1"] = answer()
    counts: list[int] = []
    found = await fetch(
        f"http://pictures.test:{site.port}/a b?q=1#part",
        limits(f"pictures.test:{site.port}"),
        "here",
        counts.append,
        policy(),
    )
    assert found == PICTURE
    assert sum(counts) == len(PICTURE)
    (request,) = site.requests
    assert f"\r\nHost: pictures.test:{site.port}\r\n" in request
    assert "Cookie" not in request
    assert "Authorization" not in request


async def test_loopback_is_refused_by_default(site: Site) -> None:
    domain = f"localhost:{site.port}"
    message = await problem(f"http://{domain}/cat.png", domain, policy=NetworkPolicy())
    assert message == "here has the host 'localhost', whose address is not public"
    assert not site.requests


async def test_one_private_address_of_several_is_refused(site: Site) -> None:
    domain = f"pictures.test:{site.port}"
    rules = policy(["127.0.0.1", "10.0.0.1"])
    assert "is not public" in await problem(f"http://{domain}/cat.png", domain, policy=rules)
    assert not site.requests


async def test_name_is_resolved_once(site: Site) -> None:
    domain = f"pictures.test:{site.port}"
    rules = policy(["127.0.0.1"], ["127.0.0.2"])
    assert await download(f"http://{domain}/cat.png", domain, policy=rules) == PICTURE
    message = await problem(f"http://{domain}/cat.png", domain, policy=rules)
    assert "is not public" in message


async def test_next_address_is_tried(site: Site) -> None:
    domain = f"pictures.test:{site.port}"
    rules = NetworkPolicy(resolver(["127.0.0.3", "127.0.0.1"]), lambda address: True)
    assert await download(f"http://{domain}/cat.png", domain, policy=rules) == PICTURE


async def test_name_without_an_address_is_an_error() -> None:
    rules = NetworkPolicy(resolver([]))
    message = await problem("http://a.test/x", "a.test", policy=rules)
    assert message == "here has the host 'a.test', which has no address"


async def test_redirects_are_followed(site: Site) -> None:
    site.answers |= {
        "/1": redirect("/2", "301 Moved"),
        "/2": redirect(f"http://other.test:{site.port}/3", "307 Temporary"),
        "/3": redirect("cat.png", "308 Permanent"),
    }
    domains = [f"pictures.test:{site.port}", f"other.test:{site.port}"]
    assert await download(f"http://{domains[0]}/1", *domains, policy=policy()) == PICTURE
    assert "Host: other.test" in site.requests[-1]


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("http://evil.test/x", "has the host 'evil.test' and the port 80, which are not among"),
        ("http://127.0.0.1/x", "has the host '127.0.0.1'"),
        ("http://pictures.test:22/x", "and the port 22, which are not among"),
        ("http://user:secret@pictures.test/x", "must not have a user name"),
        ("file:///etc/passwd", "redirects to the scheme 'file', not http or https"),
        ("gopher://pictures.test/x", "redirects to the scheme 'gopher'"),
        ("data:image/png;base64,AAAA", "redirects to the scheme 'data'"),
        ("http://pictures.test:port/x", "redirects to not a valid URL"),
        ("/again", "redirects more than 3 times"),
    ],
)
async def test_redirect_is_checked_like_a_url(site: Site, location: str, words: str) -> None:
    site.answers["/again"] = redirect(location)
    domain = f"pictures.test:{site.port}"
    assert words in await problem(f"http://{domain}/again", domain, policy=policy())
    assert len(site.requests) == (4 if location == "/again" else 1)


async def test_redirect_to_a_private_address_is_refused(site: Site) -> None:
    site.answers["/1"] = redirect("http://inner.test/x")
    domain = f"pictures.test:{site.port}"
    rules = policy(["127.0.0.1"], ["169.254.169.254"])
    message = await problem(f"http://{domain}/1", domain, "inner.test", policy=rules)
    assert message == "here has the host 'inner.test', whose address is not public"


def trusting(authority: trustme.CA) -> NetworkPolicy:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return policy(ssl_context=context)


async def test_https_has_the_name_of_the_host(secure_site: Site, authority: trustme.CA) -> None:
    domain = f"pictures.test:{secure_site.port}"
    rules = trusting(authority)
    assert await download(f"https://{domain}/cat.png", domain, policy=rules) == PICTURE
    assert secure_site.names == ["pictures.test"]


async def test_https_never_redirects_to_http(secure_site: Site, authority: trustme.CA) -> None:
    secure_site.answers["/1"] = redirect("http://pictures.test/x")
    domain = f"pictures.test:{secure_site.port}"
    rules = trusting(authority)
    message = await problem(f"https://{domain}/1", domain, "pictures.test", policy=rules)
    assert message == "here redirects from https to another scheme"


@pytest.mark.parametrize("host", ["other.test", "pictures.test"])
async def test_wrong_certificate_is_an_error(
    secure_site: Site, authority: trustme.CA, host: str
) -> None:
    domain = f"{host}:{secure_site.port}"
    rules = trusting(authority if host == "other.test" else trustme.CA())
    message = await problem(f"https://{domain}/cat.png", domain, policy=rules)
    assert "could not be downloaded: no valid certificate for" in message
    assert not secure_site.requests


CHUNKED = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (answer(status="404 Not Found"), "'pictures.test' answered with status 404"),
        (answer(status="304 Not Modified"), "answered with status 304"),
        (answer(status="302 Found"), "answered with status 302"),
        (answer(status="206 Partial Content"), "answered with status 206"),
        (answer(Content_Length="1001"), "is a file of 1,001 bytes; at most 1,000 are allowed"),
        (answer(bytes(3000), Content_Length=""), "is a file of more than "),
        (CHUNKED.encode() + b"fff\r\n" + bytes(0xFFF), "is a file of more than "),
        (answer(Content_Encoding="gzip"), "came with the content encoding 'gzip'"),
        (answer(Content_Length="500"), "no valid HTTP answer from 'pictures.test'"),
        (b"SSH-2.0-OpenSSH\r\n", "no valid HTTP answer from 'pictures.test'"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 40_000, "no valid HTTP answer from"),
        (b"", "no valid HTTP answer from"),
    ],
)
async def test_wrong_answer_is_an_error(site: Site, sent: bytes, words: str) -> None:
    site.answers["/x"] = sent
    domain = f"pictures.test:{site.port}"
    assert words in await problem(f"http://{domain}/x", domain, policy=policy(), max_bytes=1000)


async def test_host_that_does_not_listen_is_an_error(unused_tcp_port: int) -> None:
    domain = f"pictures.test:{unused_tcp_port}"
    message = await problem(f"http://{domain}/x", domain, policy=policy())
    assert message == (
        f"here could not be downloaded: no connection to 'pictures.test', port {unused_tcp_port}"
    )


@pytest.mark.parametrize("sent", [answer(), b"HTTP/1.1 200 OK\r\n" + b"a" * 1000])
async def test_slow_host_is_given_up(site: Site, sent: bytes) -> None:
    site.pause, site.answers["/x"] = 0.03, sent
    domain = f"pictures.test:{site.port}"
    message = await problem(f"http://{domain}/x", domain, policy=policy(), fetch_timeout=0.3)
    assert "could not be downloaded within 0.3 seconds" in message


async def test_slow_resolver_is_given_up() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    rules = NetworkPolicy(resolve)
    message = await problem("http://a.test/x", "a.test", policy=rules, fetch_timeout=0.1)
    assert "within 0.1 seconds; 0 bytes were received" in message


async def test_error_of_the_count_ends_the_download(site: Site) -> None:
    def count(_: int) -> None:
        raise ServerUnavailableError("too many bytes")

    domain = f"pictures.test:{site.port}"
    with pytest.raises(ServerUnavailableError, match="too many bytes"):
        await fetch(f"http://{domain}/cat.png", limits(domain), "here", count, policy())
