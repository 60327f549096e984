"""State of a chat: the conversation, its settings, and the question being entered."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.chat import store
from toolkit.chat.answers.answer_view import Answer, Message
from toolkit.chat.answers.client import ChatClient, ModelInfo
from toolkit.chat.answers.exchange import exchange
from toolkit.chat.answers.request import request_body
from toolkit.chat.context import ContextGauge, asks
from toolkit.chat.history import Conversation, shorten, text_of
from toolkit.chat.images import (
    AttachedImage,
    read_image,
    split_images,
    why_images_are_refused,
)
from toolkit.chat.screen.display import Display, display_for
from toolkit.chat.screen.signals import Signals
from toolkit.chat.screen.terminal import Terminal
from toolkit.config.clients import ChatConfig
from toolkit.console import as_text
from toolkit.errors import ConfigError, InvalidRequestError, ToolkitError


class Session:
    """One conversation with one server."""

    def __init__(
        self, client: ChatClient, model: ModelInfo, config: ChatConfig, terminal: Terminal
    ) -> None:
        self.client = client
        self.model = model
        self.config = config
        self.terminal = terminal
        self.conversation = Conversation(config.system and as_text(config.system))
        self.path = store.new_path()
        self.signals = Signals(terminal.keyboard)
        self.images: list[AttachedImage] = []  # for the next question
        self.tool_results: list[Message] = []  # entered so far, for the last answer's tool calls
        self.draft = ""  # initial text of the next question
        self.is_editing = False  # the next question replaces the last one
        self.answers: list[Answer] = []
        self.context = ContextGauge(model.max_context)

    async def submit(self, text: str) -> None:
        """Ask a question, or enter the result of the pending tool call."""
        if self.pending_call is not None:
            await self._add_tool_result(self.pending_call, text)
            return
        message = self.take_question(text)
        if self.is_editing:
            self.is_editing = False
            await self.ask_again([message])
        else:
            await self.ask([message])

    def take_question(self, text: str) -> Message:
        """Return the message of a question, with the images attached to it."""
        images, self.images = [one.to_part() for one in self.images], []
        parts = [*images, {"type": "text", "text": text}] if text else images
        return {"role": "user", "content": parts if images else text}

    @property
    def images_title(self) -> str:
        """Labels of the images that are attached to the next question."""
        return " ".join(f"[image {image.label}]" for image in self.images)

    async def attach(self, paths: Sequence[Path]) -> None:
        """Attach image files to the next question.

        Raises InvalidRequestError for other files, and if the model accepts no images."""
        images = [read_image(path) for path in paths]
        if reason := await why_images_are_refused(self.client, self.model):
            raise InvalidRequestError(f"{self.model.name} accepts no images: {reason}")
        self.model = replace(self.model, accepts_images=True)  # so that it is not tried again
        self.images += images

    async def attach_images_in(self, line: str) -> str:
        """Attach the images whose paths end a line, and return the rest of the line.

        If there is a rest and the model accepts no images, the line is a question about a path."""
        rest, paths = split_images(line)
        if not paths:
            return line
        try:
            await self.attach(paths)
        except InvalidRequestError as error:
            if not rest:
                raise
            self.terminal.note(f"{error.message} The path is sent as text.")
            return line
        return rest

    async def ask(self, new: list[Message]) -> Answer:
        """Send new messages, and show and save the answer, even if it is incomplete.

        If there is no answer, the messages become the unanswered question."""
        answer = await self.exchange(new, self.display())
        if answer.is_empty:
            self.conversation.unanswered = new
        else:
            self.conversation.append(new, answer.message)
            self.save()
        self.report(answer)
        return answer

    async def ask_again(self, question: list[Message] | None = None) -> None:
        """Ask the last question again, or `question` instead.

        If there is no answer, the conversation stays unchanged."""
        before = replace(self.conversation, messages=[*self.conversation.messages])
        last = self.conversation.pop_question()
        self.tool_results = []
        try:
            answer = await self.ask(question or last)
        except ToolkitError:
            self.conversation = before
            raise
        if answer.is_empty and len(before.messages) > len(self.conversation.messages):
            self.conversation = before

    async def continue_answer(self) -> None:
        """Continue the last answer from its end."""
        message = self.conversation.messages[-1]
        answer = await self.exchange([], self.display())
        message["content"] += answer.content
        self.save()
        self.report(answer)

    def display(self) -> Display:
        language = "json" if self.config.schema is not None else None
        return display_for(self.terminal, self.config.reasoning, language)

    async def exchange(self, new: list[Message], display: Display) -> Answer:
        """Send the conversation and new messages, and show the answer. No new ones: continue.

        Leaves out the oldest turns if the context has no room, unless --context-policy is stop."""
        trims = self.config.context_policy == "trim"
        if trims:
            count = self.context.make_room(self.conversation, new, self.config.max_tokens)
            self._note_left_out(count)
        while True:
            body = request_body(self.config, self.model.name, self.conversation.build_messages(new))
            if not new:
                body |= {"continue_final_message": True, "add_generation_prompt": False}
            answer = await exchange(self.client, body, display, self.signals)
            self.context.note(answer)
            if not (answer.exceeds_context and trims):
                return answer
            if not self.conversation.skip_oldest(keeps_last=not asks(new)):
                return answer
            self._note_left_out(1)

    def _note_left_out(self, count: int) -> None:
        if count:
            turns = "turn is" if count == 1 else f"{count} turns are"
            self.terminal.note(f"The context is full: the oldest {turns} left out from here on.")

    def report(self, answer: Answer) -> None:
        """Print the answer's error, or its stats and how it ended."""
        self.answers.append(answer)
        if answer.error is not None:
            hint = " /clear starts a new conversation." if answer.exceeds_context else ""
            self.terminal.error(answer.error + hint)
        elif answer.is_empty and not answer.is_stopped:
            self.terminal.note("The answer is empty.")
        notes = ["stopped"] if answer.is_stopped else []
        if answer.finish_reason == "length":
            notes.append(self._how_to_continue())
        self.terminal.note(" · ".join(filter(None, [*notes, answer.stats(self.model.max_context)])))
        if (warning := self.context.warning) and not self.context.is_full:
            trims = self.config.context_policy == "trim"
            then = "the oldest turns will be left out" if trims else "/clear starts a new one"
            self.terminal.note(f"{warning}: {then}")
        self.terminal.blank_line()

    def _how_to_continue(self) -> str:
        if not self.context.is_full:
            return "cut at the token limit (/continue)"
        if self.config.context_policy == "trim" and self.conversation.has_older_turns:
            return "cut at the end of the context (/continue leaves out the oldest turns)"
        return "cut at the end of the context (/clear starts a new conversation)"

    def save(self) -> None:
        """Write the conversation to disk. An error, such as a full disk, does not end the chat."""
        try:
            store.write(self.path, self.conversation, self.model.name)
        except OSError as error:
            self.terminal.error(f"Cannot save the conversation: {error.strerror} ({self.path}).")

    def rename(self, name: str) -> None:
        """Save the conversation under a name, from now on. Raises ConfigError if it is taken."""
        path = store.path_of(name)
        if path.exists() and path != self.path:
            raise ConfigError(f"There is a conversation {name} already: {path}. Choose another.")
        before, self.path = self.path, path
        self.save()
        if before != path:
            before.unlink(missing_ok=True)

    def start_conversation(self, conversation: Conversation, path: Path | None = None) -> None:
        """Switch to another conversation, saved in `path`. The current one stays on disk."""
        self.conversation = conversation
        self.path = path or store.new_path()
        self.images, self.answers, self.tool_results, self.is_editing = [], [], [], False
        self.context = ContextGauge(self.model.max_context)

    def resume(self, saved: store.SavedConversation) -> None:
        """Switch to a saved conversation and show its last question and answer."""
        self.start_conversation(saved.conversation, saved.path)
        count = self.conversation.num_questions
        self.terminal.note(
            f"Resuming a conversation of {count} question{'s' if count != 1 else ''}, "
            f"saved {saved.age}: {self.conversation.title}"
        )
        if self.terminal.is_live and self.conversation.messages:
            questions = [
                message for message in self.conversation.messages if message["role"] == "user"
            ]
            self.terminal.note(f"> {shorten(text_of(questions[-1]))}" if questions else "")
            display = display_for(self.terminal, "hidden")
            display.update(Answer(content=text_of(self.conversation.messages[-1])))
            display.finish()
            self.terminal.blank_line()

    @property
    def pending_call(self) -> dict[str, Any] | None:
        """The tool call whose result is entered next."""
        calls = [] if self.is_editing else self.conversation.pending_calls
        return calls[len(self.tool_results)] if len(self.tool_results) < len(calls) else None

    async def _add_tool_result(self, call: dict[str, Any], text: str) -> None:
        """Add the result of one call; after the last one, ask the model."""
        self.tool_results.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        if self.pending_call is None:
            new, self.tool_results = self.tool_results, []
            await self.ask(new)
