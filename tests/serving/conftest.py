"""The server, model and reference that the tests of the HTTP routes share."""

from __future__ import annotations

from tests.api.conftest import model, reference, server

__all__ = ["model", "reference", "server"]
