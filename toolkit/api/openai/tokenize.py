"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer without the model."""

import asyncio
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field, StrictBool, StrictInt
from starlette.responses import Response

from toolkit.api.http.body_fields import JsonRoute, RequestBody, Text, parse_body
from toolkit.api.http.openapi import answers
from toolkit.api.http.routes import Access, access
from toolkit.api.http.server import server_of, target_of
from toolkit.api.openai.conversation import encode_conversation
from toolkit.api.openai.schemas import ChatRequest
from toolkit.engine.async_llm import LONG_TEXT
from toolkit.errors import InvalidRequestError

router = APIRouter(tags=["tokens"], route_class=JsonRoute)

MAX_DETOKENIZED = 2**20  # tokens of one request


class TokenizeRequest(RequestBody):
    """POST /tokenize: a text, or a conversation, to which the chat template is applied.

    llama.cpp's fields for a text are content, add_special and with_pieces."""

    model_config = ConfigDict(json_schema_extra={"example": {"prompt": "The sea is"}})

    model: str | None = None
    prompt: Text | None = None
    messages: Any = Field(
        None, description="A conversation instead of a prompt; takes the options of a chat"
    )
    add_special_tokens: StrictBool = Field(
        True, description="Add the tokenizer's special tokens to a prompt (such as BOS)"
    )
    return_token_strs: StrictBool = False
    content: Text | None = Field(None, description="Text to tokenize, in place of prompt")
    add_special: StrictBool = Field(
        False, description="Add the tokenizer's special tokens to content"
    )
    with_pieces: StrictBool = Field(
        False, description="Return the token ids of content with their texts"
    )
    parse_special: StrictBool = Field(
        True, description="Texts of special tokens become these; only true"
    )

    def to_chat(self) -> ChatRequest:
        """Return the chat whose prompt is wanted. Raises InvalidRequestError."""
        own_fields = set(TokenizeRequest.model_fields) - {"model", "messages"}
        given = self.model_dump(exclude=own_fields, exclude_none=True)
        return parse_body(ChatRequest, given)


class DetokenizeRequest(RequestBody):
    """POST /detokenize."""

    model_config = ConfigDict(json_schema_extra={"example": {"tokens": [1, 2, 3]}})

    model: str | None = None
    tokens: Annotated[list[StrictInt], Field(max_length=MAX_DETOKENIZED)]


class Piece(msgspec.Struct):
    """Token with its text, or with its bytes if they are not valid UTF-8."""

    id: int
    piece: str | list[int]


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int | Piece]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str
    content: str  # the same, as llama.cpp names it


class TokenizerInfo(msgspec.Struct):
    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    special_tokens: dict[str, str]
    eos_token_ids: list[int]
    chat_template: str | None


@router.post("/tokenize", response_model=None, responses=answers(Tokens))
@access(Access.MODEL_WORK)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Tokenize a text or a conversation."""
    if [body.prompt, body.messages, body.content].count(None) != 2:
        raise InvalidRequestError(
            "/tokenize takes one of prompt, messages and content.", param="prompt"
        )
    if not body.parse_special:
        raise InvalidRequestError(
            "parse_special must be true: texts of special tokens become these.",
            param="parse_special",
        )
    chat = None if body.messages is None else body.to_chat()
    target = target_of(request, body if chat is None else chat)
    inputs = target.engine.inputs
    tokenizer = inputs.require_tokenizer()
    text, add_special_tokens = body.prompt or "", body.add_special_tokens
    if body.content is not None:
        text, add_special_tokens = body.content, body.add_special
    if chat is not None:
        tokens = await encode_conversation(target, chat.to_conversation(None), request)
    else:
        inputs.check_length(text)
        encode = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
        tokens = await asyncio.to_thread(encode) if len(text) > LONG_TEXT else encode()
    reply = Tokens(len(tokens), target.engine.info.max_model_len, [*tokens])
    if body.return_token_strs:
        reply.token_strs = [tokenizer.token_names[token] for token in tokens]
    if body.with_pieces:
        reply.tokens = [Piece(token, _piece(tokenizer.token_bytes(token))) for token in tokens]
    return _json(reply)


@router.post("/detokenize", response_model=None, responses=answers(Detokenized))
@access(Access.MODEL_WORK)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Convert tokens to text."""
    engine = target_of(request, body).engine
    tokenizer, size = engine.inputs.require_tokenizer(), engine.info.vocab_size
    wrong = next((token for token in body.tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"tokens contains {wrong}; the model's tokens are 0 to {size - 1}.", param="tokens"
        )
    if len(body.tokens) > LONG_TEXT:
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    else:
        text = tokenizer.decode(body.tokens, skip_special_tokens=False)
    return _json(Detokenized(text, text))


@router.get("/tokenizer_info", response_model=None, responses=answers(TokenizerInfo))
async def tokenizer_info(request: Request, model: str | None = None) -> Response:
    """Describe the tokenizer: its size, special tokens and chat template."""
    engine = server_of(request).find(model).engine
    inputs = engine.inputs
    tokenizer = inputs.require_tokenizer()
    return _json(
        TokenizerInfo(
            tokenizer_class=type(tokenizer).__name__,
            vocab_size=tokenizer.size,
            model_max_length=engine.info.max_model_len,
            special_tokens=tokenizer.special_tokens,
            eos_token_ids=inputs.eos_token_ids,
            chat_template=tokenizer.chat_template,
        )
    )


def _piece(text: bytes) -> str | list[int]:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return list(text)


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
