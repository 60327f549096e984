"""Fields of a request that the server does not know: told in a header, or refused with `--strict`."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterator
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar, get_args
from urllib.parse import quote

import msgspec
from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictInt,
    Tag,
    model_validator,
)
from starlette.responses import Response

from toolkit.errors import InvalidRequestError

T = TypeVar("T")

IGNORED = "X-Ignored-Fields"
"""Header of an answer whose request had fields that nobody read: their names, separated by commas."""
_MOST = 32
"""Names in the header."""


def encodable(value: T) -> T:
    """JSON's escapes can spell half a surrogate pair, which is no character and cannot be sent on, and its numbers can
    be larger than any that is.
    """
    try:
        msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, RecursionError):
        raise ValueError("Input should be valid Unicode, without lone surrogates") from None
    except OverflowError:
        raise ValueError("Input should have whole numbers of at most 64 bits") from None
    return value


Text = Annotated[str, AfterValidator(encodable)]


TEXT, LIST = Tag("(text)"), Tag("(list)")
"""Mark the branches of what may be a text or a list, for BY_KIND; no part of a parameter's name (see `errors`)."""
BY_KIND = Discriminator(lambda value: LIST.tag if isinstance(value, list) else TEXT.tag)
"""Chooses between them, so that what is wrong with a list is not told as 'should be a string'."""


def _kind_of_prompts(value: Any) -> str:
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, list):
        return "(lists)"
    return "(ids)" if type(first) is int else LIST.tag if isinstance(value, list) else TEXT.tag


TO_FIRST_MISTAKE = Field(fail_fast=True)
"""Of lists: what is refused is read no further, so that it costs no more than what is taken."""
Ids = Annotated[list[StrictInt], TO_FIRST_MISTAKE]
Prompts = Annotated[
    Annotated[Text, TEXT]
    | Annotated[list[Text], TO_FIRST_MISTAKE, LIST]
    | Annotated[Ids, Tag("(ids)")]
    | Annotated[list[Ids], TO_FIRST_MISTAKE, Tag("(lists)")],
    Discriminator(_kind_of_prompts),
]
"""A text, token ids, or several of either; the first of a list says which."""


class Body(BaseModel):
    """A part of a request. Fields that it does not have are kept apart, to be told of."""

    model_config = ConfigDict(extra="allow")


class WholeBody(Body):
    """All of a request. Null is as good as nothing for its own fields, but those that have to be given, or may be null."""

    _never_null: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        cls._never_null = frozenset(
            field.alias or name
            for name, field in cls.model_fields.items()
            if not field.is_required()
            and field.annotation is not Any
            and NoneType not in get_args(field.annotation)
        )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if value is not None or name not in cls._never_null
        }


class _Request(Request):
    """One whose JSON is read several times as fast, as nobody else is served meanwhile."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return json.loads(
                body
            )  # it says where the mistake is, and takes some that are told of later


class Route(APIRoute):
    """A route whose answers name the fields that were ignored."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_and_tell(request: Request) -> Response:
            response = await handle(_Request(request.scope, request.receive))
            ignored = getattr(request.state, "ignored_fields", None)
            if ignored:
                response.headers[IGNORED] = ignored
            return response

        return handle_and_tell


def check_fields(request: Request, body: Body, *, strict: bool) -> None:
    """Notes what of a body nobody will read, for the header. Raises InvalidRequestError instead when `strict`."""
    names = list(unknown_fields(body))
    if not names:
        return
    if strict:
        raise InvalidRequestError(
            f"There is no parameter {names[0]!r}, or it is not supported.", param=names[0][:256]
        )
    shown = [quote(name[:64], safe="._-") for name in names[:_MOST]]
    request.state.ignored_fields = ", ".join(shown + (["..."] if len(names) > _MOST else []))


def unknown_fields(body: BaseModel, where: str = "") -> Iterator[str]:
    """Names of the fields that no model has, as paths ("messages.1.weight"). One that is null asks for nothing."""
    for name, value in (body.model_extra or {}).items():
        if value is not None:
            yield where + name
    for name in body.model_fields_set:
        value = getattr(body, name)
        if isinstance(value, BaseModel):
            yield from unknown_fields(value, f"{where}{name}.")
        elif (
            isinstance(value, list) and value and not isinstance(value[0], int)
        ):  # token ids are many
            for index, one in enumerate(value):
                if isinstance(one, BaseModel):
                    yield from unknown_fields(one, f"{where}{name}.{index}.")
