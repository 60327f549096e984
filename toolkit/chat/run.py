"""`tk chat`: finds or starts a server, then runs the chat."""

import asyncio
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import httpx

from toolkit.chat import store
from toolkit.chat.answers.client import Address, ChatClient, ModelInfo
from toolkit.chat.kept import can_keep_servers, kept_server, kept_servers
from toolkit.chat.local import POLL, exit_on_signals, local_server
from toolkit.chat.once import Question, answer_once
from toolkit.chat.screen.starting import show_progress
from toolkit.chat.screen.terminal import Terminal
from toolkit.chat.session import Session
from toolkit.client.choice import choose_server, ready_servers, starting_server
from toolkit.client.trust import Trust, unreachable, why_untrusted
from toolkit.client.wire import KeyRejectedError, ServerError
from toolkit.config.clients import DEFAULT_URL, ChatConfig
from toolkit.config.engine import DEMO, LATEST
from toolkit.config.fields import Word
from toolkit.console import as_text, read_piped
from toolkit.errors import ConfigError
from toolkit.running import RunningServer

MAX_PAUSE = 30.0  # seconds between two requests that keep a private server


def run(
    config: ChatConfig,
    prepare: Callable[[str], None] = lambda model: None,
    flags: Sequence[str] = (),
) -> int:
    """Run the chat, or answer one question. Return the exit code.

    `prepare`: called before a private server of this model starts; raises if it could not chat.
    `flags`: of `tk serve`, for a private server of this chat alone."""
    for name in ("COLUMNS", "LINES"):  # exported by some shells, but wrong once the window resizes
        os.environ.pop(name, None)
    terminal = Terminal()
    config = read_word(config, terminal)
    question = _read_question(config)
    if config.json and question is None:
        raise ConfigError(
            '--json needs a question: tk chat --json "What is a KV cache?"', param="json"
        )
    saved = _newest_conversation() if config.resume else None
    with (
        exit_on_signals(signal.SIGTERM, signal.SIGHUP),
        find_server(config, terminal, prepare, is_question=question is not None, flags=flags) as (
            address,
            model,
        ),
    ):
        try:
            return asyncio.run(_chat(config, terminal, address, model, question, saved))
        except BrokenPipeError:
            # Otherwise the flush of stdout at exit fails.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


async def _chat(
    config: ChatConfig,
    terminal: Terminal,
    address: Address,
    model: ModelInfo,
    question: Question | None,
    saved: store.SavedConversation | None,
) -> int:
    client = ChatClient(address)
    session = Session(client, model, config, terminal)
    if saved is not None and config.system is not None:
        saved.conversation.system = as_text(config.system)
    try:
        with terminal.keyboard.hidden_input():
            if question is None:
                return await _converse(session, saved)
            if saved is not None:
                session.start_conversation(saved.conversation, saved.path)
            return await answer_once(session, question, is_continued=saved is not None)
    finally:
        await client.close()


async def _converse(session: Session, saved: store.SavedConversation | None) -> int:
    from toolkit.chat.repl import converse

    using = asyncio.create_task(stay_in_use(session.client))
    session.terminal.note(f"{session.model.name} at {session.client.address.title}")
    if saved is not None:
        session.resume(saved)
    code = await converse(session)
    using.cancel()
    if session.conversation.messages:
        session.terminal.hint("'tk chat --continue' resumes this conversation.")
    return code


async def stay_in_use(client: ChatClient) -> None:
    """Send requests, so that a private server does not end between two questions."""
    if client.address.idle_timeout is None:
        return
    while True:
        await asyncio.sleep(min(MAX_PAUSE, client.address.idle_timeout / 3))
        with suppress(httpx.HTTPError):
            await client.http.get("/v1/models")


def read_word(config: ChatConfig, terminal: Terminal) -> ChatConfig:
    """Return the settings with the only argument as the prompt, unless it names a model.

    A note on stderr says so."""
    word = config.model
    if not isinstance(word, Word) or _names_model(word, config):
        return config
    terminal.note(
        f"{word!r} is read as a question: no model, folder or file has this name. 'tk chat -m "
        f"{shlex.quote(word)}' chats with a model."
    )
    return replace(config, model=None, prompt=str(word))


def _names_model(word: str, config: ChatConfig) -> bool:
    """Return True for a path, a model of this machine or of a server, and a name with an owner."""
    if os.path.exists(os.path.expanduser(word)) or "/" in word or word.endswith(".gguf"):
        return True
    from toolkit.hub import is_path, local_names

    if word == DEMO or (not is_path(word) and word in local_names()):
        return True
    servers = ready_servers()
    if config.url is None and any(one.has(word) for one in [*servers, *kept_servers()]):
        return True
    for url in [config.url] if config.url else {*(one.url for one in servers), DEFAULT_URL}:
        with suppress(ServerError):
            models = _address(url, config).list_models()
            if any(_is_called(model, word) for model in models):
                return True
    return False


def _read_question(config: ChatConfig) -> Question | None:
    """Return the prompt and piped text; None if the chat is interactive."""
    piped = read_piped()
    if piped is not None and not piped.strip() and not config.prompt:
        raise ConfigError(_no_question(config.model), param="prompt")
    question = Question(as_text(config.prompt or ""), (piped or "").strip())
    return question if question.prompt or question.piped else None


def _no_question(model: str | None) -> str:
    """Return the message for an empty standard input without a prompt."""
    if model is None:
        return 'Standard input is empty: there is no question. Give one: tk chat "Who are you?"'
    word = shlex.quote(model)
    return (
        f"Standard input is empty, and {model!r} is taken as the model: there is no question. Give "
        f"one: tk chat {word} PROMPT. If {model!r} is the question: tk chat --prompt {word}"
    )


def _newest_conversation() -> store.SavedConversation:
    found = store.newest(1)
    if not found:
        raise ConfigError(
            "There is no saved conversation to continue. Run without --continue.", param="resume"
        )
    return found[0]


@contextmanager
def find_server(
    config: ChatConfig,
    terminal: Terminal,
    prepare: Callable[[str], None] = lambda model: None,
    *,
    is_question: bool = False,
    flags: Sequence[str] = (),
) -> Iterator[tuple[Address, ModelInfo]]:
    """Yield a server and a model: at --url, else one that runs or starts here, else a private one.

    Raises ServerError if it cannot be reached or started, or if only the demo model could answer a
    single question: a script would take its answer for that of a real model."""
    if config.url is not None:
        address = _address(config.url, config)
        yield address, require_chat(address, choose_model(address, config.model))
        return
    if not flags:
        found = find_running_server(config, terminal) or find_kept_server(config)
        if found is None and wait_for_start(config.model, terminal):
            found = find_running_server(config, terminal)
        if found is not None:
            yield found[0], require_chat(*found)
            return
    if is_question and config.model is None:
        raise ServerError(
            f"No server answers at {DEFAULT_URL}, and no model is given. Start one with 'tk serve "
            "MODEL', or give --url, or --model (tk-demo is the small demo model)."
        )
    if config.model is not None:
        from toolkit.hub import require_path

        require_path(config.model)
        prepare(config.model)
        if config.keep_alive_seconds and not flags and can_keep_servers():
            found = start_kept_server(config.model, config, terminal)
            yield found[0], require_chat(*found)
            return
    name = config.model or "the demo model"
    with (
        show_progress(terminal, f"Starting {name}") as tick,
        local_server(config.model, tick=tick, hint=config.word_hint, flags=flags) as server,
    ):
        tick(-1.0, "")
        terminal.hint(
            "This private server ends with the chat; 'tk serve' starts one that keeps running."
        )
        address = Address(server.url, server.api_key)
        yield address, require_chat(address, address.list_models()[0])


def wait_for_start(model: str | None, terminal: Terminal) -> bool:
    """Wait while a server starts that will have the model. Return False if none does."""
    server = starting_server(model)
    if server is None:
        return False
    started = time.monotonic()
    with show_progress(terminal, f"Waiting for {server.title} to start") as tick:
        while starting_server(model) is not None:
            tick(time.monotonic() - started, "")
            time.sleep(POLL)
    return True


def find_kept_server(config: ChatConfig) -> tuple[Address, ModelInfo] | None:
    """Return a private server that another chat has started, if it is ready and has the model.

    Without a model, the last one, but none of the demo model: it has to be named."""
    for server in reversed(kept_servers()):
        is_wanted = server.model != DEMO if config.model is None else server.has(config.model)
        if is_wanted and (found := _reach(server, config)) is not None:
            return found
    return None


def start_kept_server(
    model: str, config: ChatConfig, terminal: Terminal
) -> tuple[Address, ModelInfo]:
    """Start a private server, or wait for one that another chat starts."""
    while True:
        with show_progress(terminal, f"Starting {model}") as tick:
            server = kept_server(model, config.keep_alive_seconds, tick=tick, hint=config.word_hint)
            tick(-1.0, "")
        if (found := _reach(server, config)) is not None:
            terminal.hint(
                f"This private server ends {config.keep_alive} after the last question; 'tk stop' "
                "ends it before, --keep-alive sets another time."
            )
            return found


def _reach(server: RunningServer, config: ChatConfig) -> tuple[Address, ModelInfo] | None:
    """Return a private server's address and model; None if it has ended meanwhile.

    The request counts as use, so it does not end before the question."""
    address = Address(server.url, config.api_key, uds=server.uds, idle_timeout=server.idle_timeout)
    try:
        model = address.list_models()[0]
    except KeyRejectedError:
        raise
    except ServerError:
        return None
    is_ready = any(one.pid == server.pid and one.state == "ready" for one in kept_servers())
    return (address, model) if is_ready else None


def _address(url: str, config: ChatConfig) -> Address:
    return Address(url, config.api_key, Trust(config.cacert, config.insecure))


def choose_model(address: Address, name: str | None) -> ModelInfo:
    """Return the model of this name, or the first one. A model that is not listed may exist."""
    models = address.list_models()
    if name is None:
        return models[0]
    return next((model for model in models if _is_called(model, name)), ModelInfo(name))


def _is_called(model: ModelInfo, name: str) -> bool:
    """Return True for a model's name, with or without Ollama's tag, and the path that it has."""
    return not {name, name.removesuffix(LATEST)}.isdisjoint((model.name, model.root))


def require_chat(address: Address, model: ModelInfo) -> ModelInfo:
    """Return the model. Raises ServerError if its server says that it cannot chat."""
    if model.tasks is None or "chat" in model.tasks:
        return model
    problem = "does not generate text"
    if "transcription" in model.tasks:
        problem = "transcribes sound, and does not chat: see tk transcribe"
    elif "generate" in model.tasks:
        problem = (
            "has no chat template, so it cannot take messages: it continues text (/v1/completions)"
            ". 'tk serve --chat-template FILE' gives it a template"
        )
    raise ServerError(f"{model.name} at {address.title} {problem}.")


def find_running_server(config: ChatConfig, terminal: Terminal) -> tuple[Address, ModelInfo] | None:
    """Return a server on this machine that is healthy and has the model.

    Without a record of one, that at the default address. Raises KeyRejectedError if the only one
    that has the model, or may have it, needs another key, and ConfigError if the user has to choose
    one of several."""
    servers = ready_servers()
    if config.model is None or any(one.has(config.model) for one in servers):
        server = choose_server(config.model)
        if server is None:
            return find_model_at(DEFAULT_URL, config, terminal)
        if config.model is not None and config.model not in server.names:  # a path
            config = replace(config, model=server.names[0])
        return find_model_at(server.url, config, terminal)
    rejection: KeyRejectedError | None = None
    known = [one.url for one in servers]
    # A name may be that of an adapter, which a record does not have. A path is not of these.
    urls = [] if os.path.exists(os.path.expanduser(config.model)) else known
    if DEFAULT_URL not in known:
        urls = [*urls, DEFAULT_URL]
    for url in urls:
        try:
            if (found := find_model_at(url, config, terminal)) is not None:
                return found
        except KeyRejectedError as error:
            rejection = rejection or error
    # A server that needs a key may lack the model. Without a key, a private one starts.
    if rejection is not None and config.api_key:
        raise rejection
    return None


def find_model_at(
    url: str, config: ChatConfig, terminal: Terminal
) -> tuple[Address, ModelInfo] | None:
    """Return the server at this address if it is healthy and has the model.

    Raises KeyRejectedError if it refuses the key or needs one, and UntrustedError for its
    certificate."""
    address = _address(url, config)
    try:
        with address.client() as http:
            if http.get("/health", timeout=1.0).status_code != 200:
                return None
        models = address.list_models()
    except httpx.HTTPError as error:
        if why_untrusted(error) is not None:
            raise unreachable(url, error) from None
        return None
    except KeyRejectedError:
        raise
    except ServerError as error:
        terminal.note(f"{error.message} Starting a private server instead.")
        return None
    return next(
        ((address, model) for model in models if config.model in (None, model.name, model.root)),
        None,
    )
