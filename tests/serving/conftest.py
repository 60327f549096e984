"""Fixtures of the API tests: servers, models and the reference."""

from __future__ import annotations

from tests.api.conftest import bare_model, base, client, http, model, reference, server, start

__all__ = ["bare_model", "base", "client", "http", "model", "reference", "server", "start"]
