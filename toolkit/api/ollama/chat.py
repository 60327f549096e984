"""POST /api/chat and /api/generate: Ollama's chats and prompts."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from toolkit.api.http.body_fields import JsonRoute
from toolkit.api.http.openapi import answers
from toolkit.api.http.routes import Access, access
from toolkit.api.http.server import Target
from toolkit.api.ollama.answers import LINES, Writer, empty_answer, send_answer
from toolkit.api.ollama.models import find_target
from toolkit.api.ollama.replies import OllamaChatReply, OllamaGenerateReply
from toolkit.api.ollama.requests import OllamaChatRequest, OllamaGenerateRequest
from toolkit.api.openai.answer_parts import AnswerPlan
from toolkit.api.openai.conversation import ChatAnswer, start_answer
from toolkit.api.openai.generation import start_group

router = APIRouter(tags=["Ollama"], route_class=JsonRoute)
_TEXT_ONLY = AnswerPlan(
    reasoning=None,
    tool_format=None,
    tools=[],
    allows_parallel=True,
    needs_call=False,
    has_named_tool=False,
)


@router.post(
    "/api/chat",
    response_model=None,
    responses=answers(OllamaChatReply, stream=True, stream_type=LINES),
)
@access(Access.MODEL_WORK)
async def chat(body: OllamaChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    target = find_target(request, body)
    writer = Writer(target.name, is_chat=True)
    if not body.messages:
        target.engine.inputs.require_generation()
        return empty_answer(writer, is_unload=body.is_unload)
    asked = body.to_conversation(target.engine.default_sampling)
    answer = await start_answer(target, asked, request, _id(request))
    return await send_answer(answer, writer, target, request, is_streamed=body.stream)


@router.post(
    "/api/generate",
    response_model=None,
    responses=answers(OllamaGenerateReply, stream=True, stream_type=LINES),
)
@access(Access.MODEL_WORK)
async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
    """Answer a prompt, or continue it as it is."""
    target = find_target(request, body)
    writer = Writer(target.name, is_chat=False)
    inputs = target.engine.inputs
    if body.is_empty:
        inputs.require_generation()
        return empty_answer(writer, is_unload=body.is_unload)
    if body.is_raw(has_template=inputs.require_tokenizer().has_chat_template):
        answer = await _continue(target, body, request)
    else:
        asked = body.to_conversation(target.engine.default_sampling)
        answer = await start_answer(target, asked, request, _id(request))
    return await send_answer(answer, writer, target, request, is_streamed=body.stream)


async def _continue(target: Target, body: OllamaGenerateRequest, request: Request) -> ChatAnswer:
    """Start to continue a prompt as it is."""
    params = body.params(target.engine.default_sampling)
    group = await start_group(target, [body.prompt], params, request_id=_id(request), priority=0)
    return ChatAnswer(group, _TEXT_ONLY, target.engine.inputs.require_tokenizer(), params)


def _id(request: Request) -> str:
    return f"ollama-{request.state.request_id}"
