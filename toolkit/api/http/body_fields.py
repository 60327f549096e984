"""Request bodies. Unknown fields are named in a response header, or rejected with `--strict`."""

import json
from collections.abc import Callable, Coroutine, Iterator, Mapping
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
    ValidationError,
    model_validator,
)
from starlette.responses import Response

from toolkit.api.http.client_fields import ACCEPTED, NO_EFFECT
from toolkit.api.http.error_bodies import join, validation_error
from toolkit.errors import InvalidRequestError

T = TypeVar("T")
B = TypeVar("B", bound="RequestBody")

IGNORED = "X-Ignored-Fields"
"""Response header with the names of fields that the server ignored, separated by commas."""
_MAX_NAMES = 32  # in the header


def encodable(value: T) -> T:
    """Check that MessagePack can encode a value. Raises ValueError.

    JSON escapes allow lone surrogates, and its integers have any size."""
    try:
        msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, RecursionError):
        raise ValueError("must be valid Unicode, without lone surrogates") from None
    except OverflowError:
        raise ValueError("must have whole numbers of at most 64 bits") from None
    return value


Text = Annotated[str, AfterValidator(encodable)]


TEXT, LIST = Tag("(text)"), Tag("(list)")
"""Tags of a union of text and list. `validation_error` drops names in parentheses."""
BY_KIND = Discriminator(lambda value: LIST.tag if isinstance(value, list) else TEXT.tag)
"""Chooses the branch by type, so that an invalid list is not reported as 'should be a string'."""


def _kind_of_prompts(value: Any) -> str:
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, list):
        return "(lists)"
    return "(ids)" if type(first) is int else LIST.tag if isinstance(value, list) else TEXT.tag


FAIL_FAST = Field(fail_fast=True)
"""For lists: validation stops at the first error, so that an invalid list costs no more time."""
Ids = Annotated[list[StrictInt], FAIL_FAST]
Prompts = Annotated[
    Annotated[Text, TEXT]
    | Annotated[list[Text], FAIL_FAST, LIST]
    | Annotated[Ids, Tag("(ids)")]
    | Annotated[list[Ids], FAIL_FAST, Tag("(lists)")],
    Discriminator(_kind_of_prompts),
]  # A text, token ids, or a list of either. A list's first element decides which


class Body(BaseModel):
    """An object in a request. Unknown fields are kept, to be reported."""

    model_config = ConfigDict(extra="allow")
    refused_fields: ClassVar[Mapping[str, str]] = {}
    """Reasons, by undeclared field, to refuse a request with it."""


class RequestBody(Body):
    """The body of a request. Null means the default for its optional fields that cannot be null."""

    _never_null: ClassVar[frozenset[str]] = frozenset()

    @property
    def param_names(self) -> Mapping[str, str]:
        """The engine's parameters whose names differ here."""
        return {}

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


def parse_body(kind: type[B], given: Any) -> B:
    """Return a body that another one holds. Raises InvalidRequestError."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise validation_error(list(error.errors())) from None


class _Request(Request):
    """Request that decodes JSON several times as fast. Decoding blocks the event loop."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            # Reports the position of an error, and accepts some bodies that are rejected later.
            return json.loads(body)


class Route(APIRoute):
    """Route whose responses name the ignored fields."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_and_name_ignored(request: Request) -> Response:
            response = await handle(_Request(request.scope, request.receive))
            ignored = getattr(request.state, "ignored_fields", None)
            if ignored:
                response.headers[IGNORED] = ignored
            return response

        return handle_and_name_ignored


class JsonRoute(Route):
    """Route whose body is JSON, whatever its Content-Type: Ollama's curl lines send none."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            others = [one for one in request.scope["headers"] if one[0] != b"content-type"]
            headers = [*others, (b"content-type", b"application/json")]
            return await handle(Request({**request.scope, "headers": headers}, request.receive))

        return handle_json


def check_fields(request: Request, body: Body, *, strict: bool) -> None:
    """Store the names of unknown fields for the header.

    Raises InvalidRequestError for a refused field and, if `strict`, for an unknown one."""
    names = list(unknown_fields(body))
    if not names:
        return
    if strict:
        raise InvalidRequestError(
            f"{names[0]!r} is not a supported parameter.", param=names[0][:256]
        )
    shown = [quote(name[:64], safe="._-[]") for name in names[:_MAX_NAMES]]
    request.state.ignored_fields = ", ".join(shown + (["..."] if len(names) > _MAX_NAMES else []))


def unknown_fields(body: Body, prefix: str = "") -> Iterator[str]:
    """Yield paths of unknown fields that are not null, such as "messages[1].weight".

    Raises InvalidRequestError for a refused field."""
    for name, value in (body.model_extra or {}).items():
        reason = body.refused_fields.get(name)
        if reason is None:
            if value is not None and name not in ACCEPTED:
                yield join(prefix, name)
        elif value not in NO_EFFECT:
            path = join(prefix, name)
            raise InvalidRequestError(f"{path} is not supported: {reason}.", param=path)
    for name in body.model_fields_set:
        value = getattr(body, name)
        if isinstance(value, Body):
            yield from unknown_fields(value, join(prefix, name))
        # Skip token ids, which are many.
        elif isinstance(value, list) and value and not isinstance(value[0], int):
            for index, one in enumerate(value):
                if isinstance(one, Body):
                    yield from unknown_fields(one, join(join(prefix, name), index))
