"""Slash commands of the chat."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table
from rich.text import Text

from toolkit.chat import store
from toolkit.chat.answers.request import SAMPLING
from toolkit.chat.history import Conversation, shorten, text_of
from toolkit.chat.screen.clipboard import copy
from toolkit.chat.session import Session
from toolkit.config.clients import ChatConfig
from toolkit.config.fields import Option, options
from toolkit.errors import ConfigError, InvalidRequestError, ToolkitError, did_you_mean

SETTABLE = (*SAMPLING, "schema", "tools", "stream", "reasoning")
OLLAMA_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
OLLAMA_NOTES = {
    "verbose": "Each answer is followed by its tokens and its speed; /stats sums them up.",
    "num_ctx": "The server sets the length of the context: tk serve --max-model-len N.",
    "think": "/set reasoning full, short or hidden shows the model's reasoning.",
    "format": "/set schema FILE gives answers the form of a JSON schema.",
}
MAX_LISTED = 10  # saved conversations shown by /load
BLOCK = '"""'  # around text of several lines, which is sent as it is
KEYS = (
    ("Enter", "send; Alt-Enter, or Esc and Enter: new line"),
    (f"{BLOCK} … {BLOCK}", "text of several lines; Enter: new line"),
    ("Ctrl-C", "stop the answer and keep the text so far; twice: leave"),
    ("Ctrl-T", "show the reasoning of the last answer"),
    ("Ctrl-R", "search earlier questions"),
    ("Ctrl-X Ctrl-E", "write the question in an editor"),
    ("Ctrl-D, Ctrl-Z", "leave; suspend"),
)


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A command's function, and the argument and help text shown by /help and the completion."""

    run: Callable[[Session, str], Awaitable[None]]
    argument: str
    help: str


COMMAND_LINE = re.compile(r"(/[a-z]*|/\?)(?:\s+(.*))?", re.DOTALL)
"""Matches a line that is a command, but no path such as /etc/hosts. `//` escapes the slash."""
ALIASES = {"/?": "/help", "/bye": "/exit", "/quit": "/exit"}
LEAVING = ("exit", "quit")  # lines that leave without a slash
NAME = re.compile(r"(?!\d+$)[\w-]+")  # of a saved conversation; numbers are for the list


async def handle_line(session: Session, line: str) -> bool:
    """Run a command, attach images, or ask a question. Return False when the user leaves."""
    if not line.strip():
        return True
    if line.strip() in LEAVING and session.pending_call is None:
        return False
    try:
        if line.strip().startswith(BLOCK):
            if text := line.strip().removeprefix(BLOCK).removesuffix(BLOCK).strip("\n"):
                await session.submit(text)
            return True
        if found := COMMAND_LINE.fullmatch(line.strip()):
            return await run_command(session, found[1], (found[2] or "").strip())
        line = line.strip().replace("//", "/", 1) if line.startswith("//") else line
        if session.pending_call is None:
            rest = await session.attach_images_in(line)
            if rest != line:
                lead = "" if rest else "Attached to the next question: "
                session.terminal.note(f"{lead}{session.images_title}")
            line = rest
        if line.strip():
            await session.submit(line)
    except ToolkitError as error:
        session.terminal.error(error.message)
    return True


async def run_command(session: Session, name: str, argument: str) -> bool:
    """Run a command, given by its name or an unambiguous prefix. Return False for /exit.

    Raises ToolkitError if the command is unknown or fails."""
    name = ALIASES.get(name, name)
    near = [known for known in COMMANDS if known.startswith(name)]
    known = name if name in COMMANDS else near[0] if len(near) == 1 else None
    if known is None:
        hint = (
            f" Did you mean {' or '.join(near)}?"
            if 1 < len(near) < 7
            else did_you_mean(name, COMMANDS)
        )
        raise InvalidRequestError(f"Unknown command {name}.{hint or ' /help lists them.'}")
    if known == "/exit":
        return False
    await COMMANDS[known].run(session, argument)
    return True


async def show_help(session: Session, argument: str) -> None:
    rows = [
        (f"{name} {command.argument}".strip(), command.help) for name, command in COMMANDS.items()
    ]
    _print_table(session, [*rows, *KEYS])


async def set_system(session: Session, argument: str) -> None:
    if argument:
        session.conversation.system = argument
        session.terminal.note("The system message is set.")
    else:
        session.terminal.note(session.conversation.system or "There is no system message.")


async def change_setting(session: Session, argument: str) -> None:
    name, _, value = argument.removeprefix("parameter ").strip().partition(" ")
    if name == "system":
        await set_system(session, value.strip())
        return
    if name in OLLAMA_NOTES:
        session.terminal.note(OLLAMA_NOTES[name])
        return
    if name == "num_predict" and value.strip().startswith("-"):
        value = ""  # no limit
    name = OLLAMA_NAMES.get(name, name)
    rows = _settings()
    if not name:
        _print_table(
            session, [(row.name, _format_value(session.config, row)) for row in rows.values()]
        )
        return
    row = rows.get(name.replace("-", "_"))
    if row is None:
        hint = did_you_mean(name, rows) or f" Settings: {', '.join(rows)}."
        raise ConfigError(f"Unknown setting {name}.{hint}")
    new = row.parse(value.strip(), f"/set {row.name}") if value.strip() else row.default
    session.config = replace(session.config, **{row.name: new})
    session.terminal.note(f"{row.name}: {_format_value(session.config, row)}")


async def show(session: Session, argument: str) -> None:
    conversation = session.conversation
    if argument == "reasoning":
        found = next((m for m in reversed(conversation.messages) if m["role"] == "assistant"), {})
        session.terminal.note(
            found.get("reasoning_content", "").strip() or "The last answer has no reasoning."
        )
    elif argument == "messages":
        session.terminal.note(conversation.to_markdown())
    elif argument:
        raise InvalidRequestError("Usage: /show, /show messages or /show reasoning.")
    else:
        context = session.model.max_context
        _print_table(
            session,
            [
                ("server", session.client.address.title),
                ("model", session.model.name),
                ("context", _format_context(context) or "unknown"),
                ("system", conversation.system or "none"),
                ("questions", str(conversation.num_questions)),
                ("saved in", str(session.path)),
                *((row.name, _format_value(session.config, row)) for row in _settings().values()),
            ],
        )


async def change_model(session: Session, argument: str) -> None:
    models = {model.name: model for model in session.client.address.list_models()}
    if not argument:
        _print_table(
            session,
            [
                (
                    f"{'*' if model.name == session.model.name else ' '} {model.name}",
                    _format_context(model.max_context),
                )
                for model in models.values()
            ],
        )
        return
    if argument not in models:
        listed, more = list(models)[:8], len(models) - 8
        known = ", ".join([*listed, f"{more} more (/model)"] if more > 0 else listed)
        hint = did_you_mean(argument, models) or f" It lists: {known}."
        raise InvalidRequestError(f"The server does not list a model {argument}.{hint}")
    session.model = models[argument]
    session.terminal.note(f"The model is now {argument}.")


async def retry(session: Session, argument: str) -> None:
    _require_question(session)
    await session.ask_again()


async def edit(session: Session, argument: str) -> None:
    _require_question(session)
    unanswered = session.conversation.unanswered
    questions = [m for m in unanswered or session.conversation.messages if m["role"] == "user"]
    session.draft = text_of(questions[-1]) if questions else ""
    session.is_editing = True
    session.terminal.note("Enter replaces the last question; Ctrl-C cancels.")


async def undo(session: Session, argument: str) -> None:
    _require_question(session)
    [question, *_] = session.conversation.pop_question()
    session.tool_results = []
    session.save()
    session.terminal.note(f"Removed: {shorten(text_of(question))}")


async def continue_answer(session: Session, argument: str) -> None:
    message = session.conversation.last_message
    if message is None or message["role"] != "assistant" or session.conversation.pending_calls:
        raise InvalidRequestError("There is no answer to continue.")
    await session.continue_answer()


async def save(session: Session, argument: str) -> None:
    if not argument:
        session.save()
        session.terminal.note(
            f"Saved to {session.path}, as after each answer. /save NAME names the conversation, "
            "/save FILE.md writes Markdown."
        )
        return
    if NAME.fullmatch(argument):
        session.rename(argument)
        session.terminal.note(f"Saved. /load {argument} resumes the conversation.")
        return
    path = Path(argument).expanduser()
    if not path.suffix:
        raise InvalidRequestError(
            "The name of a conversation has letters, digits, - and _, and not only digits; a file "
            f"ends with .md or .json. Got {argument!r}."
        )
    try:
        if path.suffix == ".json":
            store.write(path, session.conversation, session.model.name)
        else:
            path.write_text(session.conversation.to_markdown())
    except OSError as error:
        raise InvalidRequestError(f"Cannot write {path}: {error.strerror}.") from None
    session.terminal.note(f"Saved to {path}")


async def load(session: Session, argument: str) -> None:
    saved = [found for found in store.newest(MAX_LISTED) if found.path != session.path]
    named = store.path_of(argument)
    if not argument and not saved:
        session.terminal.note("There are no saved conversations.")
    elif not argument:
        _print_table(
            session,
            [
                (
                    f"/load {found.name or number}",
                    f"{found.age}, {found.model}: {found.conversation.title}",
                )
                for number, found in enumerate(saved, 1)
            ],
        )
    elif NAME.fullmatch(argument) and named.exists():
        session.resume(store.read(named))
    elif NAME.fullmatch(argument) and not Path(argument).exists():
        hint = did_you_mean(argument, [found.name for found in saved if found.name])
        raise InvalidRequestError(
            f"There is no conversation {argument}.{hint or ' /load lists them.'}"
        )
    elif argument.isdecimal() and not 1 <= int(argument) <= len(saved):
        raise InvalidRequestError(f"There is no conversation {argument}: /load lists {len(saved)}.")
    elif argument.isdecimal():
        session.resume(saved[int(argument) - 1])
    else:
        session.resume(store.read(Path(argument).expanduser()))


async def show_stats(session: Session, argument: str) -> None:
    answers = session.answers
    if not answers:
        session.terminal.note("There are no answers yet.")
        return
    speeds = [
        answer.tokens_per_second for answer in answers if answer.tokens_per_second is not None
    ]
    cached = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    _print_table(
        session,
        [
            ("answers", f"{len(answers):,}"),
            ("tokens in", f"{sum(answer.prompt_tokens or 0 for answer in answers):,}"),
            ("cached", f"{sum(cached):,}" if cached else "not reported by the server"),
            ("tokens out", f"{sum(answer.completion_tokens for answer in answers):,}"),
            ("mean tok/s", f"{sum(speeds) / len(speeds):,.1f}" if speeds else "unknown"),
            ("last answer", answers[-1].stats(session.model.max_context) or "no tokens"),
        ],
    )


async def copy_answer(session: Session, argument: str) -> None:
    answers = [text_of(m) for m in session.conversation.messages if m["role"] == "assistant"]
    if not answers:
        raise InvalidRequestError("There is no answer to copy.")
    text = answers[-1]
    if argument == "code":
        from toolkit.chat.screen.markdown import code_blocks

        text = "\n".join(code_blocks(text))
        if not text:
            raise InvalidRequestError("The last answer has no code.")
    elif argument:
        raise InvalidRequestError("Usage: /copy for the last answer, /copy code for its code.")
    session.terminal.note(copy(text, session.terminal))


async def clear(session: Session, argument: str) -> None:
    session.start_conversation(Conversation(session.conversation.system))
    session.terminal.note("New conversation. /load lists the old one.")


async def attach_image(session: Session, argument: str) -> None:
    if not argument:
        raise InvalidRequestError("Usage: /image FILE, which attaches it to the next question.")
    await session.attach([Path(argument).expanduser()])
    session.terminal.note(f"Attached to the next question: {session.images_title}")


async def leave(session: Session, argument: str) -> None:
    """Do nothing: `run_command` handles /exit."""


COMMANDS = {
    "/help": SlashCommand(show_help, "", "list commands and keys"),
    "/system": SlashCommand(set_system, "[TEXT]", "show or set the system message"),
    "/set": SlashCommand(
        change_setting, "[NAME [VALUE]]", "show or change settings; no VALUE: reset"
    ),
    "/show": SlashCommand(show, "[messages|reasoning]", "show state, messages or reasoning"),
    "/model": SlashCommand(change_model, "[NAME]", "list the server's models, or switch to one"),
    "/retry": SlashCommand(retry, "", "answer the last question again"),
    "/edit": SlashCommand(edit, "", "change the last question and ask it again"),
    "/undo": SlashCommand(undo, "", "remove the last question and its answer"),
    "/continue": SlashCommand(continue_answer, "", "continue the last answer"),
    "/save": SlashCommand(
        save, "[NAME|FILE]", "name the conversation, or write it to .md or .json"
    ),
    "/load": SlashCommand(load, "[NAME|FILE]", "list saved conversations, or resume one"),
    "/stats": SlashCommand(show_stats, "", "show tokens and speed so far"),
    "/copy": SlashCommand(copy_answer, "[code]", "copy the last answer, or its code"),
    "/clear": SlashCommand(clear, "", "start a new conversation"),
    "/image": SlashCommand(attach_image, "FILE", "attach an image to the next question"),
    "/exit": SlashCommand(leave, "", "leave; also /bye, /quit, exit"),
}


def _settings() -> dict[str, Option]:
    return {row.name: row for row in options(ChatConfig) if row.name in SETTABLE}


def _format_value(config: ChatConfig, row: Option) -> str:
    value = getattr(config, row.name)
    if value is None:
        return "the server's default" if row.name in SAMPLING else "none"
    return {True: "on", False: "off"}[value] if row.type is bool else str(value)


def _require_question(session: Session) -> None:
    if session.conversation.unanswered is None and not session.conversation.num_questions:
        raise InvalidRequestError("There is no question yet.")


def _format_context(tokens: int | None) -> str:
    return f"{tokens:,} tokens" if tokens else ""


def _print_table(session: Session, rows: list[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 2))
    for left, right in rows:
        table.add_row(Text(left), Text(right, style="dim"))
    session.terminal.err_console.print(table)
