"""Plug-ins of a front end: parsers of answers, and middleware between access control and routes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit import plugins
from toolkit.config import ServerConfig
from toolkit.plugins import Group, Plugin
from toolkit.text.parsers import Parsers

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


@dataclass(frozen=True, slots=True)
class FrontEndPlugins:
    """Plug-ins that a front end uses."""

    parsers: Parsers = field(default_factory=Parsers)
    middleware: Mapping[Plugin, Any] = field(default_factory=dict)
    strict: bool = False  # a broken one ends the server

    @classmethod
    def load(cls, config: ServerConfig, *, strict: bool) -> FrontEndPlugins:
        """Load those of installed packages, by name, then those that flags name.

        Raises ConfigError for an unknown name. Raises PluginError for a broken plug-in that a flag
        names, and for any other if `strict`; else that is logged and left out."""
        named = plugins.named(Group.MIDDLEWARE, config.middleware)
        middleware = plugins.load_installed(Group.MIDDLEWARE, strict=strict)
        return cls(
            Parsers.choose(config, strict=strict),
            middleware | {plugin: plugin.load() for plugin in named},
            strict,
        )

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Put the middleware around an application, the first outermost. Raises PluginError."""
        from starlette.middleware.base import BaseHTTPMiddleware

        wrapped = _with_own_send(app)
        for plugin, one in reversed([*self.middleware.items()]):
            try:
                is_class = inspect.isclass(one)
                wrapped = one(wrapped) if is_class else BaseHTTPMiddleware(wrapped, dispatch=one)
            except Exception as error:
                plugins.report(plugin.error(error), strict=self.strict or not plugin.package)
        return _with_app(wrapped, app) if self.middleware else app


def _with_own_send(app: ASGIApp) -> ASGIApp:
    """Let streams send through the middleware, which may wrap `send`."""
    from toolkit.api.http.streaming import SERVER_SEND

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        scope[SERVER_SEND] = send
        await app(scope, receive, send)

    return call


def _with_app(wrapped: ASGIApp, app: ASGIApp) -> ASGIApp:
    """Let middleware read `request.app`, which the application sets too late for it."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = app
        await wrapped(scope, receive, send)

    return call
