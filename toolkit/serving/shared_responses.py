"""Stored responses of a server with several API workers. The first process has them."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Literal

import msgspec

from toolkit.api.http.stored_responses import ResponseStore, StoredResponse


class ResponseQuery(msgspec.Struct, tag="response_query"):
    """Call of a method of `Responses`. The answer is a ResponseAnswer with the same ticket."""

    ticket: int
    method: Literal["add", "update", "find", "remove"]
    owner: int
    id: str
    record: StoredResponse | None = None  # to add, or to update


class ResponseAnswer(msgspec.Struct, tag="response_answer"):
    ticket: int
    record: StoredResponse | None = None
    is_stored: bool = False


async def answer(store: ResponseStore, query: ResponseQuery, worker: int) -> ResponseAnswer:
    """Do in the first process what an API worker asks for."""
    found = ResponseAnswer(query.ticket)
    if query.record is not None:
        query.record.worker = worker
        if query.method == "add":
            found.is_stored = await store.add(query.record)
        else:
            await store.update(query.record)
    elif query.method == "find":
        found.record = await store.find(query.owner, query.id)
    else:
        found.record = await store.remove(query.owner, query.id)
    return found


class SharedResponses:
    """The stored responses, as an API worker sees them."""

    def __init__(self, send: Callable[[ResponseQuery], None]) -> None:
        self._send = send
        self._tickets = itertools.count()
        self._waiting: dict[int, asyncio.Future[ResponseAnswer]] = {}

    async def add(self, record: StoredResponse) -> bool:
        return (await self._ask("add", record.owner, record.id, record)).is_stored

    async def update(self, record: StoredResponse) -> None:
        await self._ask("update", record.owner, record.id, record)

    async def find(self, owner: int, id: str) -> StoredResponse | None:
        return (await self._ask("find", owner, id)).record

    async def remove(self, owner: int, id: str) -> StoredResponse | None:
        return (await self._ask("remove", owner, id)).record

    def receive(self, answer: ResponseAnswer) -> None:
        """Take the answer to a query."""
        waiting = self._waiting.get(answer.ticket)  # None: the request was cancelled
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def _ask(
        self,
        method: Literal["add", "update", "find", "remove"],
        owner: int,
        id: str,
        record: StoredResponse | None = None,
    ) -> ResponseAnswer:
        ticket = next(self._tickets)
        waiting: asyncio.Future[ResponseAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = waiting
        self._send(ResponseQuery(ticket, method, owner, id, record))
        try:
            return await waiting
        finally:
            del self._waiting[ticket]
