"""Who may ask for what: API keys and the admin key."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from enum import IntEnum

from fastapi import Request

from toolkit.errors import ToolkitError

SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
]
"""Of every answer: no browser takes it for something else, shows it in a frame, or tells others of it."""
STRICT_TRANSPORT = [(b"strict-transport-security", b"max-age=31536000")]
"""With TLS: from now on without it no more."""


class UnauthorizedError(ToolkitError):
    """The key is missing or wrong."""

    status = 401
    type = "authentication_error"


class ForbiddenError(ToolkitError):
    """The key is right, and not for this."""

    status = 403
    type = "permission_error"


class Role(IntEnum):
    """What a key opens."""

    NOBODY = 0
    USER = 1
    ADMIN = 2


class Keys:
    """The keys that open the server. Without any, everybody is admin; without an admin key, every user is."""

    def __init__(self, api_keys: Iterable[str] = (), admin_key: str | None = None) -> None:
        self._user = Role.USER if admin_key is not None else Role.ADMIN
        self._roles = [(key.encode(), self._user) for key in api_keys]
        self._nobody = Role.NOBODY if self._roles else self._user
        if admin_key is not None:
            self._roles.append((admin_key.encode(), Role.ADMIN))

    def find(self, headers: Mapping[bytes, bytes]) -> tuple[Role, int]:
        """What a request's key opens, and which key it is (-1: none that is known).

        The key is that of 'Authorization: Bearer KEY' or, as Anthropic's clients send it, 'X-API-Key: KEY'. Every
        known key is compared, each in constant time.
        """
        given = _given(headers)
        role, which = self._nobody, -1
        for index, (key, opens) in enumerate(self._roles):
            if hmac.compare_digest(given, key):
                role, which = opens, index
        return role, which


def require_admin(request: Request) -> None:
    """FastAPI dependency of the routes that are the operator's alone. Raises ForbiddenError for a key that is not the
    admin's, UnauthorizedError for none.
    """
    role = getattr(request.state, "role", Role.ADMIN)
    if role is Role.NOBODY:
        raise wants_key()
    if role is not Role.ADMIN:
        if not _given(dict(request.scope["headers"])):
            raise wants_key("admin key")
        raise ForbiddenError(
            f"{request.url.path} is for the operator: it wants the admin key.", code="admin_only"
        )


def wants_key(kind: str = "API key") -> UnauthorizedError:
    """The error of a request without the right key."""
    return UnauthorizedError(
        f"This server wants its {kind}: send 'Authorization: Bearer KEY'.", code="invalid_api_key"
    )


def _given(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()
