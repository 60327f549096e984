"""API keys, the admin key, and the security headers of every response."""

import hmac
import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from urllib.parse import urlsplit

from toolkit.config import ServerConfig
from toolkit.errors import InvalidRequestError, ToolkitError

SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
]
STRICT_TRANSPORT = [(b"strict-transport-security", b"max-age=31536000")]
"""Sent with TLS: browsers use no other protocol from then on."""


class UnauthorizedError(ToolkitError):
    """The key is missing or wrong."""

    status = 401
    type = "authentication_error"


class ForbiddenError(ToolkitError):
    """The key is valid, but does not allow this request."""

    status = 403
    type = "permission_error"


class Role(Enum):
    """Rights of a key."""

    NONE = auto()
    USER = auto()
    ADMIN = auto()


class Keys:
    """Accepted keys. Without any key everyone is admin; without an admin key every user is."""

    def __init__(self, api_keys: Iterable[str] = (), admin_key: str | None = None) -> None:
        self._user = Role.USER if admin_key is not None else Role.ADMIN
        self._roles = [(key.encode(), self._user) for key in api_keys]
        self._without_key = Role.NONE if self._roles else self._user
        if admin_key is not None:
            self._roles.append((admin_key.encode(), Role.ADMIN))

    def find(self, headers: Mapping[bytes, bytes]) -> tuple[Role, int]:
        """Return a request's role, and the index of its key (-1: no accepted key).

        The key is in 'Authorization: Bearer KEY' or, as Anthropic's clients send it, in
        'X-API-Key: KEY'. Every accepted key is compared, each in constant time."""
        given = _given_key(headers)
        role, found = self._without_key, -1
        for index, (key, key_role) in enumerate(self._roles):
            if hmac.compare_digest(given, key):
                role, found = key_role, index
        return role, found


def check_admin(role: Role, headers: Mapping[bytes, bytes], path: str) -> None:
    """Raise ForbiddenError for a key without admin rights, UnauthorizedError for no key."""
    if role is Role.ADMIN:
        return
    if not _given_key(headers):
        raise missing_key("admin key")
    raise ForbiddenError(f"{path} is for the operator: it needs the admin key.", code="admin_only")


def missing_key(kind: str = "API key") -> UnauthorizedError:
    """Return the error of a request without an accepted key."""
    return UnauthorizedError(
        f"This server needs its {kind}: send 'Authorization: Bearer KEY'.", code="invalid_api_key"
    )


def _given_key(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()


ONCE = (b"host", b"authorization", b"x-api-key", b"content-type")
"""Headers that servers and proxies would read differently if they came twice."""


def check_headers(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise InvalidRequestError for headers that are ambiguous."""
    counts = Counter(name for name, _ in headers)
    twice = next((name for name in ONCE if counts[name] > 1), None)
    if twice is not None:
        raise InvalidRequestError(f"The request has {counts[twice]} {twice.decode()} headers.")
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and codings != [b"chunked"]:
        raise InvalidRequestError("Transfer-Encoding may only be chunked.")


class Sites:
    """Refuses what pages of other sites make a browser send to a server without keys.

    A site can give its own name the address 127.0.0.1 (DNS rebinding), and reads the answers then.
    And any page can send a POST whose answer it cannot read."""

    def __init__(self, config: ServerConfig) -> None:
        is_local = config.uds is None and _is_loopback(config.host)
        self._has_keys = bool(config.api_key)
        self._hosts = {host.lower() for host in config.allowed_hosts}
        self._checks_hosts = is_local and not self._has_keys and "*" not in self._hosts
        self._origins = {origin.lower() for origin in config.allowed_origins}

    def check(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise ForbiddenError for a request of another site."""
        if self._has_keys:
            return
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = _name_of(f"//{host}")
        if self._checks_hosts and name not in self._hosts and not _is_loopback(name):
            raise ForbiddenError(
                "This server has no API key, so it answers only requests for this machine, not for "
                f"{host[:64]!r}. --allowed-hosts adds a name, such as that of a reverse proxy.",
                code="host_not_allowed",
            )
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if not origin or method in ("GET", "HEAD", "OPTIONS"):
            return
        if origin.partition("://")[2] != host and not self._origins & {origin, "*"}:
            raise ForbiddenError(
                "This server has no API key, so it takes no requests from pages of "
                f"{origin[:64]!r}. --allowed-origins allows a site.",
                code="origin_not_allowed",
            )


def _name_of(url: str) -> str:
    """Return the host of a URL without its port; `?` if it has none that can be read."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return "?"


def _is_loopback(host: str) -> bool:
    """Return True for localhost and addresses of this machine alone; for no name, too."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in ("", "localhost") or host.endswith(".localhost")
