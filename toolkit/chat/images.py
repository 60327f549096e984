"""Pictures in a question, for models that take them."""

from __future__ import annotations

import base64
from pathlib import Path

from toolkit.chat.client import ChatClient, ModelCard
from toolkit.client.wire import ServerError
from toolkit.errors import InvalidRequestError

MOST_BYTES = 20 << 20
KINDS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif"}
PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"
)


def as_data_url(path: Path) -> str:
    """A picture as the API takes it. Raises InvalidRequestError when it is none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"Cannot read {path}: {error.strerror}.") from None
    if len(content) > MOST_BYTES:
        raise InvalidRequestError(
            f"{path} has {len(content) >> 20} MiB; at most {MOST_BYTES >> 20} are sent."
        )
    kind = next((kind for begin, kind in KINDS.items() if content.startswith(begin)), None)
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        kind = "webp"
    if kind is None:
        raise InvalidRequestError(f"{path} is no picture: PNG, JPEG, GIF and WebP are known.")
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


async def takes_images(client: ChatClient, card: ModelCard) -> str | None:
    """Why a model takes no images; None when it does. Where the server does not say, it is asked to look at one
    pixel.
    """
    if card.takes_images is not None:
        return None if card.takes_images else "the server says so."
    picture = {"type": "image_url", "image_url": {"url": PIXEL}}
    messages = [{"role": "user", "content": [picture, {"type": "text", "text": "?"}]}]
    body = {"model": card.name, "messages": messages, "max_tokens": 1, "stream": False}
    try:
        async for _ in client.ask(body):
            pass
    except ServerError as error:
        return error.message
    return None
