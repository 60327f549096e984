"""Pictures and clips in the messages of a conversation, as chat templates take them.

The content of a message with some is a list of parts: {"type": "text", "text": ...}, and
{"type": "image"} or {"type": "audio"}, for which templates of models that see or hear write the
model's placeholder. For a template that reads no parts, the content is text with a stand-in for
each place: a character that no message has. It becomes the placeholder after the template was
rendered, since a placeholder in a message is ordinary text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from toolkit.engine.front.clips import Sound
from toolkit.engine.front.pictures import PictureImage, PictureUrl
from toolkit.errors import InvalidParamError
from toolkit.pictures.tokens import JOINT, PictureTokens
from toolkit.text.tokenizer import Tokenizer, unused_character

IMAGE, SOUND = {"type": "image"}, {"type": "audio"}  # places
ROLES = ("user", "tool")  # of messages that may have some
_AROUND = {
    "<|image_pad|>": ("<|vision_start|>", "<|vision_end|>"),
    "<|audio_pad|>": ("<|audio_start|>", "<|audio_end|>"),
}
"""Special tokens around the placeholders of some models."""


def content_of(
    parts: Iterable[str | dict[str, str]], joint: str = ""
) -> str | list[dict[str, str]]:
    """Return the content of a message of texts and places.

    Texts without a place between them are joined. Without places the content is text."""
    content: list[dict[str, str]] = []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        content += _text_part(texts, joint)
        content.append(part)
        texts = []
    if not content:
        return joint.join(texts)
    return [*content, *_text_part(texts, joint)]


def require_role(role: object, param: str, what: str = "picture") -> None:
    """Raise InvalidParamError for a picture or a clip in a message of another role."""
    if role not in ROLES:
        raise InvalidParamError(
            param,
            f"is a {what} in a message of the role {str(role)[:64]!a}. Send {what}s in messages "
            "of the roles user and tool.",
        )


def split_features(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[PictureUrl | PictureImage], list[Sound]]:
    """Return messages for a template, and the pictures and sounds in their parts: see `LLM.chat`.

    Raises InvalidParamError."""
    changed: list[Any] = []
    pictures: list[PictureUrl | PictureImage] = []
    sounds: list[Sound] = []
    for index, message in enumerate(messages):
        place = f"messages[{index}].content"
        parts = [
            _feature_in(part, f"{place}[{number}]") or part
            for number, part in enumerate(_parts_of(message))
        ]
        found = [part for part in parts if not isinstance(part, dict)]
        if found:
            what = "clip" if isinstance(found[0], Sound) else "picture"
            require_role(message.get("role"), found[0].param, what)
            texts = (
                _text_in(part, f"{place}[{number}]")
                if isinstance(part, dict)
                else (SOUND if isinstance(part, Sound) else IMAGE)
                for number, part in enumerate(parts)
            )
            message = {**message, "content": content_of(texts)}
        changed.append(message)
        for one in found:
            if isinstance(one, Sound):
                sounds.append(one)
            else:
                pictures.append(one)
    return changed, pictures, sounds


def count_places(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(part in (IMAGE, SOUND) for message in messages for part in _parts_of(message))


def join_parts(options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return options of a template whose messages are text, and the stand-in for places."""
    stand_in = unused_character(options)
    messages = []
    for message in options["messages"]:
        if parts := list(_parts_of(message)):
            texts = (stand_in if part in (IMAGE, SOUND) else part.get("text", "") for part in parts)
            message = {**message, "content": "".join(texts)}
        messages.append(message)
    return {**options, "messages": messages}, stand_in


def placeholder(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of a place, with what the model expects around it."""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    before, after = _AROUND.get(text, ("", ""))
    if not (tokenizer.is_special_text(before) and tokenizer.is_special_text(after)):
        return text
    return before + text + after


def frame_pictures(tokenizer: Tokenizer, tokens: PictureTokens, text: str) -> str:
    """Return text with all tokens of a picture where the start of its frame stands for it.

    The joints become tokens together with the text around them. Text with placeholders stays."""
    if (frame := tokens.frame) is None:
        return text
    start, row, end = (
        tokenizer.decode([one], skip_special_tokens=False)
        for one in (frame.start, tokens.placeholder, frame.end)
    )
    return (
        text
        if row in text
        else text.replace(start, f"{JOINT}{start}{row * frame.count}{end}{JOINT}")
    )


def _feature_in(part: Mapping[str, Any], param: str) -> PictureUrl | PictureImage | Sound | None:
    """Return the picture or sound of a part; None if it has text. Raises InvalidParamError."""
    kind = part.get("type")
    if kind == "audio":
        return Sound(part.get("audio"), f"{param}.audio")
    if kind not in ("image_url", "image_pil", "image"):
        return None
    value, param = part.get(kind), f"{param}.{kind}"
    if kind != "image_url":
        return PictureImage(value, param)
    if isinstance(value, Mapping):
        value, param = value.get("url"), f"{param}.url"
    if not isinstance(value, str):
        raise InvalidParamError(param, f"must be a text, not {type(value).__name__}")
    return PictureUrl(value, param)


def _text_in(part: Mapping[str, Any], param: str) -> str:
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidParamError(
            param, f"must be text, a picture or sound, not a part of the type {part.get('type')!r}"
        )
    return text


def _parts_of(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list | tuple):
        yield from (part for part in content if isinstance(part, dict))


def _text_part(texts: Sequence[str], joint: str) -> list[dict[str, str]]:
    text = joint.join(texts)
    return [{"type": "text", "text": text}] if text else []
