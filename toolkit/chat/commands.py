"""What begins with a slash."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table
from rich.text import Text

from toolkit.chat import store
from toolkit.chat.history import Conversation, short, text_of
from toolkit.chat.images import as_data_url, takes_images
from toolkit.chat.request import SAMPLING
from toolkit.chat.screen.clipboard import copy
from toolkit.chat.session import Session
from toolkit.config.clients import ChatConfig
from toolkit.config.fields import Option, options
from toolkit.errors import ConfigError, InvalidRequestError, ToolkitError, did_you_mean

SETTABLE = (*SAMPLING, "schema", "tools", "stream", "reasoning")
LISTED = 10  # saved conversations that /load shows
KEYS = (
    ("Enter", "sends; Alt-Enter, or Esc and Enter: a new line"),
    ("Ctrl-C", "stops the answer; what came is kept. Twice: leaves"),
    ("Ctrl-T", "shows the reasoning behind the last answer"),
    ("Ctrl-R", "searches earlier questions"),
    ("Ctrl-X Ctrl-E", "opens an editor for the question"),
    ("Ctrl-D, Ctrl-Z", "leaves; suspends"),
)


@dataclass(frozen=True, slots=True)
class Command:
    """`run` does it; `argument` and `help` are what /help and the completion show of it."""

    run: Callable[[Session, str], Awaitable[None]]
    argument: str
    help: str


COMMAND = re.compile(r"(/[a-z]*)(?:\s+(.*))?", re.DOTALL)
"""A line that is a command; a path like /etc/hosts is not. `//` begins a question with a slash."""


async def handle_line(session: Session, line: str) -> bool:
    """Run a command, or ask a question. Return False when the user leaves."""
    if not line.strip():
        return True
    try:
        if found := COMMAND.fullmatch(line.strip()):
            return await run_command(session, found[1], (found[2] or "").strip())
        await session.say(line.strip().replace("//", "/", 1) if line.startswith("//") else line)
    except ToolkitError as error:
        session.terminal.error(error.message)
    return True


async def run_command(session: Session, name: str, argument: str) -> bool:
    """Does a command, which may be cut short where that is clear; False for the one that leaves.

    Raises ToolkitError when it cannot be done.
    """
    near = [known for known in COMMANDS if known.startswith(name)]
    known = name if name in COMMANDS else near[0] if len(near) == 1 else None
    if known is None:
        hint = (
            f" Did you mean {' or '.join(near)}?"
            if 1 < len(near) < 7
            else did_you_mean(name, COMMANDS)
        )
        raise InvalidRequestError(f"There is no command {name}.{hint or ' /help lists them.'}")
    if known == "/exit":
        return False
    await COMMANDS[known].run(session, argument)
    return True


async def show_help(session: Session, argument: str) -> None:
    rows = [
        (f"{name} {command.argument}".strip(), command.help) for name, command in COMMANDS.items()
    ]
    _table(session, [*rows, *KEYS])


async def system(session: Session, argument: str) -> None:
    if argument:
        session.conversation.system = argument
        session.terminal.note("The system message is set.")
    else:
        session.terminal.note(session.conversation.system or "There is no system message.")


async def change_setting(session: Session, argument: str) -> None:
    name, _, value = argument.partition(" ")
    rows = _settings()
    if not name:
        _table(session, [(row.name, _shown(session.config, row)) for row in rows.values()])
        return
    row = rows.get(name.replace("-", "_"))
    if row is None:
        hint = did_you_mean(name, rows) or f" There are: {', '.join(rows)}."
        raise ConfigError(f"There is no setting {name}.{hint}")
    new = row.parse(value.strip(), f"/set {row.name}") if value.strip() else row.default
    session.config = replace(session.config, **{row.name: new})
    session.terminal.note(f"{row.name}: {_shown(session.config, row)}")


async def show(session: Session, argument: str) -> None:
    conversation = session.conversation
    if argument == "reasoning":
        found = next((m for m in reversed(conversation.messages) if m["role"] == "assistant"), {})
        session.terminal.note(
            found.get("reasoning_content", "").strip() or "The last answer has no reasoning."
        )
    elif argument == "messages":
        session.terminal.note(conversation.transcript())
    elif argument:
        raise InvalidRequestError("/show, /show messages or /show reasoning.")
    else:
        _table(
            session,
            [
                ("server", session.client.address.url),
                ("model", session.card.name),
                (
                    "context",
                    f"{session.card.max_context:,} tokens"
                    if session.card.max_context
                    else "unknown",
                ),
                ("system", conversation.system or "none"),
                ("questions", str(conversation.num_questions)),
                ("saved in", str(session.path)),
                *((row.name, _shown(session.config, row)) for row in _settings().values()),
            ],
        )


async def model(session: Session, argument: str) -> None:
    cards = {card.name: card for card in session.client.address.models()}
    if not argument:
        _table(
            session,
            [
                (
                    f"{'*' if card.name == session.card.name else ' '} {card.name}",
                    _context(card.max_context),
                )
                for card in cards.values()
            ],
        )
        return
    if argument not in cards:
        hint = did_you_mean(argument, cards) or f" It lists: {', '.join(list(cards)[:8])}."
        raise InvalidRequestError(f"The server lists no model {argument}.{hint}")
    session.card = cards[argument]
    session.terminal.note(f"{argument} answers from here on.")


async def retry(session: Session, argument: str) -> None:
    _needs_question(session)
    await session.ask_again()


async def edit(session: Session, argument: str) -> None:
    _needs_question(session)
    waiting = session.conversation.unanswered
    questions = [m for m in waiting or session.conversation.messages if m["role"] == "user"]
    session.draft = text_of(questions[-1]) if questions else ""
    session.is_edit = True
    session.terminal.note(
        "Enter asks it in the place of the last question; Ctrl-C leaves all as it is."
    )


async def undo(session: Session, argument: str) -> None:
    _needs_question(session)
    [question, *_] = session.conversation.take_back()
    session.results = []
    session.save()
    session.terminal.note(f"Taken back: {short(text_of(question))}")


async def go_on(session: Session, argument: str) -> None:
    answer = session.conversation.answer
    if answer is None or answer["role"] != "assistant" or session.conversation.open_calls:
        raise InvalidRequestError("There is no answer to continue.")
    await session.go_on()


async def save(session: Session, argument: str) -> None:
    if not argument:
        session.save()
        session.terminal.note(
            f"Saved to {session.path}, as after each answer. /save FILE.md writes it to read."
        )
        return
    path = Path(argument).expanduser()
    try:
        if path.suffix == ".json":
            store.write(path, session.conversation, session.card.name)
        else:
            path.write_text(session.conversation.transcript())
    except OSError as error:
        raise InvalidRequestError(f"Cannot write {path}: {error.strerror}.") from None
    session.terminal.note(f"Saved to {path}")


async def load(session: Session, argument: str) -> None:
    saved = [found for found in store.newest(LISTED) if found.path != session.path]
    if not argument and not saved:
        session.terminal.note("No conversation is saved.")
    elif not argument:
        _table(
            session,
            [
                (f"/load {number}", f"{found.age}, {found.model}: {found.conversation.title}")
                for number, found in enumerate(saved, 1)
            ],
        )
    elif argument.isdecimal() and not 1 <= int(argument) <= len(saved):
        raise InvalidRequestError(f"There is no conversation {argument}: /load lists {len(saved)}.")
    elif argument.isdecimal():
        session.resume(saved[int(argument) - 1])
    else:
        session.resume(store.read(Path(argument).expanduser()))


async def stats(session: Session, argument: str) -> None:
    answers = session.answers
    if not answers:
        session.terminal.note("Nothing has been answered yet.")
        return
    speeds = [
        answer.tokens_per_second for answer in answers if answer.tokens_per_second is not None
    ]
    cached = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    _table(
        session,
        [
            ("answers", f"{len(answers):,}"),
            ("tokens in", f"{sum(answer.prompt_tokens or 0 for answer in answers):,}"),
            ("of them cached", f"{sum(cached):,}" if cached else "the server does not say"),
            ("tokens out", f"{sum(answer.completion_tokens for answer in answers):,}"),
            ("mean tok/s", f"{sum(speeds) / len(speeds):,.1f}" if speeds else "unknown"),
            ("last answer", answers[-1].stats(session.card.max_context) or "nothing came"),
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
        raise InvalidRequestError("/copy takes the last answer, /copy code its code.")
    session.terminal.note(copy(text, session.terminal))


async def clear(session: Session, argument: str) -> None:
    session.begin(Conversation(session.conversation.system))
    session.terminal.note("A new conversation. /load finds the old one.")


async def image(session: Session, argument: str) -> None:
    if not argument:
        raise InvalidRequestError("/image FILE: a picture that goes with the next question.")
    url = as_data_url(Path(argument).expanduser())
    if reason := await takes_images(session.client, session.card):
        raise InvalidRequestError(f"{session.card.name} takes no images: {reason}")
    session.card = replace(session.card, takes_images=True)  # it is not asked again
    session.images.append(url)
    session.terminal.note(f"{Path(argument).name} goes with the next question.")


async def leave(session: Session, argument: str) -> None:
    """`run_command` has left before."""


COMMANDS = {
    "/help": Command(show_help, "", "this text"),
    "/system": Command(system, "[TEXT]", "shows or sets the system message"),
    "/set": Command(change_setting, "[NAME [VALUE]]", "shows or changes settings; no VALUE: back"),
    "/show": Command(show, "[messages|reasoning]", "what is in force, was said, was thought"),
    "/model": Command(model, "[NAME]", "shows the server's models, or changes to one"),
    "/retry": Command(retry, "", "answers the last question again"),
    "/edit": Command(edit, "", "changes the last question and asks it again"),
    "/undo": Command(undo, "", "takes the last question and its answer back"),
    "/continue": Command(go_on, "", "lets the last answer go on"),
    "/save": Command(save, "[FILE]", "writes the conversation, as Markdown or .json"),
    "/load": Command(load, "[NUMBER|FILE]", "lists saved conversations, or goes on with one"),
    "/stats": Command(stats, "", "tokens and speed so far"),
    "/copy": Command(copy_answer, "[code]", "the last answer, or its code, to the clipboard"),
    "/clear": Command(clear, "", "begins a new conversation"),
    "/image": Command(image, "FILE", "a picture for the next question"),
    "/exit": Command(leave, "", "leaves"),
}


def _settings() -> dict[str, Option]:
    return {row.name: row for row in options(ChatConfig) if row.name in SETTABLE}


def _shown(config: ChatConfig, row: Option) -> str:
    value = getattr(config, row.name)
    if value is None:
        return "the server's" if row.name in SAMPLING else "none"
    return {True: "on", False: "off"}[value] if row.type is bool else str(value)


def _needs_question(session: Session) -> None:
    if session.conversation.unanswered is None and not session.conversation.num_questions:
        raise InvalidRequestError("Nothing has been asked yet.")


def _context(tokens: int | None) -> str:
    return f"{tokens:,} tokens" if tokens else ""


def _table(session: Session, rows: list[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 2))
    for left, right in rows:
        table.add_row(Text(left), Text(right, style="dim"))
    session.terminal.talk.print(table)
