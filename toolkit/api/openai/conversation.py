"""Shared by chats, responses and Anthropic's messages: the prompt of a conversation, its answer."""

import asyncio
import binascii
import re
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from toolkit.api.http.server import Target
from toolkit.api.http.streaming import while_connected
from toolkit.api.openai.answer_parts import AnswerParser, AnswerPart, AnswerPlan
from toolkit.api.openai.beams import Beams, start_beams
from toolkit.api.openai.generation import AnswerGroup, start_group, token_logprobs
from toolkit.api.openai.replies import TokenLogprob
from toolkit.api.openai.tools import ToolUse
from toolkit.engine.front.clips import require_length
from toolkit.engine.front.feature_places import count_places, join_parts
from toolkit.engine.front.input_processor import Prompt
from toolkit.engine.front.pictures import Picture, Pictures, PictureUrl, require_sight
from toolkit.errors import InvalidParamError, InvalidRequestError
from toolkit.sampling.params import SamplingParams
from toolkit.speech.clip import Clip
from toolkit.speech.pool import Samples
from toolkit.text.chat_template import has_system
from toolkit.text.generic_tools import GenericFormat, describe_tools, write_out
from toolkit.text.harmony import adapt_conversation, is_harmony
from toolkit.text.tokenizer import Tokenizer

_READS_OBJECTS = re.compile(r"\.(?:items|keys)\(|\|\s*(?:items|dictsort)\b")
"""In a chat template: it may read the arguments of calls one by one, and not take text."""
LONG_CONVERSATION = 20_000
"""Characters above which a conversation is rendered and tokenized in a thread."""


@dataclass(frozen=True, slots=True)
class SoundFile:
    """A file in base64, and the parameter of the request that has it."""

    data: str
    param: str


@dataclass(slots=True, kw_only=True)
class Conversation:
    """A chat to answer. Every interface builds it from its validated request."""

    messages: list[dict[str, Any]]  # as chat templates take them
    pictures: Sequence[PictureUrl] = ()  # in the order of their places
    sounds: Sequence[SoundFile] = ()  # in the order of their places
    options: dict[str, Any]  # further input of the template
    tools: ToolUse = field(default_factory=ToolUse)
    template: str | None = None  # the request's own
    params: SamplingParams | None = None  # None: only the prompt is wanted
    beams: Beams | None = None  # instead of sampling
    priority: int = 0

    @property
    def length(self) -> int:
        """Estimate of the characters that a template processes.

        With a constant per message, call and tool."""
        length = 100 * len(self.messages) + 500 * len(self.tools.tools)
        for message in self.messages:
            content = message["content"] or ""
            texts = [content] if isinstance(content, str) else [p.get("text", "") for p in content]
            length += sum(map(len, texts)) + len(message.get("reasoning_content", ""))
            for call in message.get("tool_calls", ()):
                length += 100 + len(str(call["function"]["arguments"]))
        return length


@dataclass(slots=True)
class ChatAnswer:
    """Running answers to one conversation."""

    group: AnswerGroup
    plan: AnswerPlan
    tokenizer: Tokenizer
    params: SamplingParams
    finish_reason: str | None = None  # set when `parts` is exhausted
    stop_reason: int | str | None = None
    has_complete_calls: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of tokens that parts may lack

    def take_logprobs(self) -> list[TokenLogprob]:
        """Return those of the tokens since the last call. Empty unless they are asked for."""
        taken, self.logprobs = self.logprobs, []
        return taken

    async def parts(self) -> AsyncIterator[AnswerPart]:
        """Yield the single answer as it arrives. Raises EngineError."""
        parser = AnswerParser(self.plan) if self.plan.has_parts else None
        async for _, delta in self.group.deltas():
            reason = delta.finish_reason
            if delta.logprobs is not None:
                top = self.params.logprobs or 0
                self.logprobs += token_logprobs(delta.logprobs, self.tokenizer, top)
            if parser is None:
                parts = [AnswerPart("text", delta.text)] if delta.text else []
            else:
                parts = parser.parts(delta.text, reason, delta.stop_reason)
                reason = None if reason is None else parser.finish_reason(reason)
                self.has_complete_calls = parser.has_complete_calls
            for part in parts:
                yield part
            if reason is not None:
                self.finish_reason, self.stop_reason = reason, delta.stop_reason


async def start_answer(
    target: Target, asked: Conversation, request: Request, request_id: str
) -> ChatAnswer:
    """Start the answers to a conversation.

    Raises InvalidRequestError, and ServerUnavailableError for too many bytes of pictures."""
    target.engine.inputs.require_generation()
    target.engine.inputs.require_text("messages")
    token_ids = await _encode_conversation(target, asked, request)
    tokenizer = target.engine.tokenizer
    assert tokenizer is not None, "without a tokenizer there is no chat prompt"
    assert asked.params is not None, "only the prompt is wanted"
    template = tokenizer.chat_template_text if asked.template is None else asked.template
    plan = AnswerPlan.of(asked.tools, template, token_ids, tokenizer, target.server.plugins.parsers)
    params = plan.constrain(asked.params, tokenizer)
    pictures = await _load_pictures(target, asked, request, is_checked=True)
    prompt: Prompt = token_ids
    if pictures:
        prompt = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": pictures}}
    elif asked.sounds:
        clips = await _load_clips(target, asked, request)
        prompt = {"prompt_token_ids": token_ids, "multi_modal_data": {"audio": clips}}
    if asked.beams is not None:
        group = await start_beams(
            target,
            [prompt],
            asked.beams,
            request_id=request_id,
            priority=asked.priority,
            skip_special_tokens=params.skip_special_tokens,
        )
    else:
        group = await start_group(
            target, [prompt], params, request_id=request_id, priority=asked.priority
        )
    return ChatAnswer(group, plan, tokenizer, params)


async def encode_conversation(target: Target, asked: Conversation, request: Request) -> list[int]:
    """Return the prompt tokens of a conversation, those of pictures and clips included.

    Raises InvalidRequestError."""
    token_ids = await _encode_conversation(target, asked, request)
    if asked.sounds:
        clips = await _load_clips(target, asked, request)
        return target.engine.inputs.place_clips(token_ids, clips)[0]
    if not (pictures := await _load_pictures(target, asked, request, is_checked=False)):
        return token_ids
    return _sight_of(target, asked).expand(token_ids, pictures)[0]


async def render_conversation(target: Target, asked: Conversation) -> str:
    """Return the prompt of a conversation as text. Special tokens that messages spell stay in it.

    Raises InvalidRequestError, also for pictures, clips and a template of the request."""
    names = [one.param for one in asked.pictures] + [one.param for one in asked.sounds]
    if asked.template is not None:
        names.insert(0, "chat_template")
    if names:
        name = names[0]
        raise InvalidRequestError(f"{name} is not supported: the prompt is text.", param=name)
    tokenizer = target.engine.inputs.require_tokenizer()
    messages, options = _adapt(target, asked, _options(target, asked))

    def render() -> str:
        return tokenizer.render_chat(messages, **options)

    is_long = asked.length > LONG_CONVERSATION
    return await asyncio.to_thread(render) if is_long else render()


async def _load_pictures(
    target: Target, asked: Conversation, request: Request, *, is_checked: bool
) -> list[Picture]:
    """Return the pictures of a conversation. For errors see `Pictures.resolve`."""
    if not asked.pictures:
        return []
    resolving = _sight_of(target, asked).resolve(asked.pictures, is_checked=is_checked)
    return await while_connected(request, resolving)


async def _load_clips(target: Target, asked: Conversation, request: Request) -> list[Clip]:
    """Return the clips of a conversation.

    Raises InvalidRequestError, and ServerUnavailableError for too many bytes of sound."""
    pool, limits = target.server.sound, target.engine.info.sound
    assert pool is not None, "a model hears"
    assert limits is not None, "and this one"

    def decode(sound: SoundFile) -> Future[Samples]:
        try:
            data = binascii.a2b_base64(sound.data.encode(), strict_mode=True)
        except ValueError as error:
            raise InvalidParamError(sound.param, f"is not valid base64: {error}.") from None
        if not data:
            raise InvalidParamError(sound.param, "is empty.")
        return pool.decode(data, sound.param)

    async def load(sound: SoundFile) -> Clip:
        samples = await asyncio.wrap_future(await asyncio.to_thread(decode, sound))
        clip = await asyncio.to_thread(Clip.of, samples)
        require_length(clip, limits.seconds, sound.param)
        return clip

    return await while_connected(request, _gather([load(one) for one in asked.sounds]))


async def _gather(loads: Sequence[Coroutine[Any, Any, Clip]]) -> list[Clip]:
    return await asyncio.gather(*loads)


def _require_sound(target: Target, asked: Conversation) -> None:
    """Raise InvalidRequestError if the model does not hear."""
    if target.engine.info.sound is None:
        raise InvalidRequestError(
            f"{target.name} does not hear: the prompt has sound.",
            param=asked.sounds[0].param,
            code="model_not_supported",
        )


def _sight_of(target: Target, asked: Conversation) -> Pictures:
    """Raise InvalidRequestError if the model does not see."""
    return require_sight(target.engine.inputs.pictures, target.name, asked.pictures[0].param)


async def _encode_conversation(target: Target, asked: Conversation, request: Request) -> list[int]:
    """Return the prompt tokens of a conversation. A picture or clip is one token.

    A long conversation is rendered in a thread, and the request's own template in another process:
    the event loop stays free. Raises InvalidRequestError if the chat template refuses the messages,
    or the model an option."""
    config = target.server.config
    if asked.pictures:
        _sight_of(target, asked).require_number(len(asked.pictures), "prompt")
    if asked.sounds:
        _require_sound(target, asked)
    if asked.template is not None and not config.trust_request_chat_template:
        raise InvalidRequestError(
            "This server accepts no chat template in a request. "
            "--trust-request-chat-template allows it.",
            param="chat_template",
        )
    is_long = asked.length > LONG_CONVERSATION
    messages, options = _adapt(target, asked, _options(target, asked))
    allow = config.allow_special_tokens_in_messages
    if asked.template is not None:
        given = {"messages": messages, **options}
        return await _encode_apart(target, request, asked.template, given, allow)

    def encode() -> list[int]:
        return target.engine.inputs.chat_prompt(messages, allow_special_tokens=allow, **options)

    return await asyncio.to_thread(encode) if is_long else encode()


def _options(target: Target, asked: Conversation) -> dict[str, Any]:
    """Return the template's input other than the messages."""
    options = {**(target.server.config.default_chat_template_kwargs or {}), **asked.options}
    if asked.tools.tools:
        options["tools"] = [tool.given for tool in asked.tools.tools]
    return options


async def _encode_apart(
    target: Target, request: Request, template: str, given: dict[str, Any], allow: bool
) -> list[int]:
    """Return the prompt tokens of a conversation in the template of its request."""
    inputs = target.engine.inputs
    tokenizer = inputs.require_tokenizer()

    async def encode(given: dict[str, Any], stand_in: str = "") -> list[int]:
        separator = None
        if not allow:
            given, separator = await asyncio.to_thread(tokenizer.protect, given)
        rendering = target.server.templates.render(
            tokenizer.find_template(template), tokenizer.special_tokens, given
        )
        text = await while_connected(request, rendering)
        return await asyncio.to_thread(inputs.encode_chat, text, separator, stand_in)

    # As `InputProcessor.chat_prompt`.
    if not (count := count_places(given["messages"])):
        return await encode(given)
    with suppress(InvalidRequestError):
        if inputs.count_places(token_ids := await encode(given)) == count:
            return token_ids
    return await encode(*join_parts(given))


def _adapt(
    target: Target, asked: Conversation, options: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages and options as the chat template takes them.

    `system` replaces `developer` if the template lacks that role. Raises InvalidRequestError for
    what the model does not have."""
    messages, given = asked.messages, asked.template
    tokenizer = target.engine.tokenizer
    template = ""
    if tokenizer is not None:
        template = tokenizer.find_template(given) if given else tokenizer.chat_template_text
    broken = [call for one in messages for call in one.get("tool_calls", ()) if _is_broken(call)]
    if broken and _READS_OBJECTS.search(template):
        for call in broken:
            call["function"]["arguments"] = {}
    if is_harmony(template):
        return adapt_conversation(messages, options)
    if "developer" not in template:
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    if target.server.plugins.parsers.tool_format_for(template) is not GenericFormat:
        return messages, options
    tools, instructions = options.pop("tools", None), ""
    if tools:
        instructions = describe_tools(tools, parallel=asked.tools.allows_parallel)
    elif "tool_calls" in template or not any("tool_calls" in one for one in messages):
        return messages, options
    # A template of the request must not run in this process.
    writes_system = has_system(template) if given is None else "system" in template
    return write_out(messages, instructions, has_system=writes_system), options


def _is_broken(call: dict[str, Any]) -> bool:
    return not isinstance(call["function"]["arguments"], dict)
