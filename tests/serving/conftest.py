"""The servers, models and reference that the tests of the HTTP routes share."""

from __future__ import annotations

from tests.api.conftest import bare_model, base, client, http, model, reference, server, start

__all__ = ["bare_model", "base", "client", "http", "model", "reference", "server", "start"]
