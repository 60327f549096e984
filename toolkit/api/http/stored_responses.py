"""Responses of /v1/responses that are kept for later requests, within bounds, and in memory alone.

One process of a server has them: with several API workers, the one that starts the workers
(`serving.shared_responses`)."""

from typing import Protocol

import msgspec

MAX_STORED_BYTES = 256 * 2**20  # of all responses together
MAX_RESPONSE_BYTES = 64 * 2**20  # of one, with its conversation


class StoredResponse(msgspec.Struct):
    """A response, and the conversation that it answers."""

    id: str
    owner: int  # index of the API key that may read it; -1: of a server without keys
    response: bytes  # JSON
    items: bytes  # JSON: input items of the complete conversation
    is_background: bool = False
    engine_id: str = ""  # of the request in the engine while it runs in the background
    worker: int = 0  # number of the API worker that runs it

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items) + 512


class Responses(Protocol):
    """Access to the stored responses, from any process of the server."""

    async def add(self, record: StoredResponse) -> bool:
        """Store a response. Returns False for one that is too large."""
        ...

    async def update(self, record: StoredResponse) -> None:
        """Replace a response, unless it has been removed."""
        ...

    async def find(self, owner: int, id: str) -> StoredResponse | None: ...

    async def remove(self, owner: int, id: str) -> StoredResponse | None: ...


class ResponseStore:
    """The newest responses, of all API keys together."""

    def __init__(self, max_responses: int) -> None:
        self._max_responses = max_responses
        self._records: dict[tuple[int, str], StoredResponse] = {}  # the oldest first
        self._size = 0

    async def add(self, record: StoredResponse) -> bool:
        """Store a response, and evict the oldest beyond the bounds."""
        if record.size > MAX_RESPONSE_BYTES or not self._max_responses:
            return False
        self._pop(record.owner, record.id)
        self._records[record.owner, record.id] = record
        self._size += record.size
        while len(self._records) > self._max_responses or self._size > MAX_STORED_BYTES:
            self._pop(*next(iter(self._records)))
        return True

    async def update(self, record: StoredResponse) -> None:
        """Replace a response, unless it has been removed."""
        if (record.owner, record.id) in self._records:
            await self.add(record)

    async def find(self, owner: int, id: str) -> StoredResponse | None:
        return self._records.get((owner, id))

    async def remove(self, owner: int, id: str) -> StoredResponse | None:
        return self._pop(owner, id)

    def fail(self, worker: int) -> None:
        """Report a failure for the responses that an API worker ran when it died."""
        for record in self._records.values():
            if record.engine_id and record.worker == worker:
                response = msgspec.json.decode(record.response)
                message = "The server process that was answering has ended unexpectedly."
                response |= {"status": "failed"}
                response["error"] = {"code": "server_error", "message": message}
                self._size -= record.size
                record.response, record.engine_id = msgspec.json.encode(response), ""
                self._size += record.size

    def _pop(self, owner: int, id: str) -> StoredResponse | None:
        record = self._records.pop((owner, id), None)
        if record is not None:
            self._size -= record.size
        return record
