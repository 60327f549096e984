"""API keys, the admin key, and the security headers of every response."""

import hmac
from collections.abc import Iterable, Mapping
from enum import Enum, auto

from toolkit.errors import ToolkitError

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
