"""Middleware: a response header with the seconds until the response began."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Timing:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.perf_counter()

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                seconds = f"{time.perf_counter() - start:.3f}".encode()
                message["headers"] = [*message["headers"], (b"x-seconds", seconds)]
            await send(message)

        await self.app(scope, receive, reply)
