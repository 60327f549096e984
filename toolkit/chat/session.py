"""The conversation: what each line that the user enters does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.chat import store
from toolkit.chat.answer_view import Answer, Message
from toolkit.chat.client import ChatClient, ModelCard
from toolkit.chat.exchange import exchange
from toolkit.chat.history import Conversation, short, text_of
from toolkit.chat.request import request_body
from toolkit.chat.screen.display import display_for
from toolkit.chat.screen.signals import Signals
from toolkit.chat.screen.terminal import Terminal
from toolkit.config.clients import ChatConfig
from toolkit.errors import ToolkitError


class Session:
    """One conversation with one server."""

    def __init__(
        self, client: ChatClient, card: ModelCard, config: ChatConfig, terminal: Terminal
    ) -> None:
        self.client = client
        self.card = card
        self.config = config
        self.terminal = terminal
        self.conversation = Conversation(config.system)
        self.path = store.new_path()
        self.signals = Signals(terminal.keyboard)
        self.images: list[str] = []  # as data: addresses, which go with the next question
        self.results: list[Message] = []  # of the tools that the last answer calls, so far
        self.draft = ""  # what the next question begins as
        self.is_edit = False  # the next question takes the place of the last one
        self.answers: list[Answer] = []

    async def say(self, text: str) -> None:
        """A question; or the result of the tool that the model has called."""
        if self.open_call is not None:
            await self._give_result(self.open_call, text)
            return
        content: str | list[Message] = text
        if self.images:
            pictures = [{"type": "image_url", "image_url": {"url": image}} for image in self.images]
            content = [*pictures, {"type": "text", "text": text}]
        message = {"role": "user", "content": content}
        self.images = []
        if self.is_edit:
            self.is_edit = False
            await self.ask_again([message])
        else:
            await self.ask([message])

    async def ask(self, new: list[Message]) -> Answer:
        """Shows the answer to new messages and keeps it, whole or broken off. Without one the messages are put aside."""
        answer = await self.exchange(self.conversation.request(new))
        if answer.is_empty:
            self.conversation.unanswered = new
        else:
            self.conversation.keep(new, answer.message)
            self.save()
        self.report(answer)
        return answer

    async def ask_again(self, question: list[Message] | None = None) -> None:
        """Asks the last question anew, or another one in its place. Without an answer all stays as it was."""
        before = replace(self.conversation, messages=[*self.conversation.messages])
        last = self.conversation.take_back()
        self.results = []
        try:
            answer = await self.ask(question or last)
        except ToolkitError:
            self.conversation = before
            raise
        if answer.is_empty and len(before.messages) > len(self.conversation.messages):
            self.conversation = before

    async def go_on(self) -> None:
        """The last answer goes on where it ended."""
        message = self.conversation.messages[-1]
        answer = await self.exchange(self.conversation.request([]), continues=True)
        message["content"] += answer.content
        self.save()
        self.report(answer)

    async def exchange(self, messages: list[Message], *, continues: bool = False) -> Answer:
        """Asks, and shows what comes."""
        body = request_body(self.config, self.card.name, messages)
        if continues:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        language = "json" if self.config.schema is not None else None
        display = display_for(self.terminal, self.config.reasoning, language)
        return await exchange(self.client, body, display, self.signals)

    def report(self, answer: Answer) -> None:
        """What is to be said of an answer, below it."""
        self.answers.append(answer)
        if answer.error is not None:
            self.terminal.error(answer.error)
        elif answer.is_empty and not answer.stopped:
            self.terminal.note("The answer is empty.")
        notes = ["stopped"] if answer.stopped else []
        if answer.finish_reason == "length":
            notes.append("cut at its most tokens: /continue goes on")
        self.terminal.note(" · ".join(filter(None, [*notes, answer.stats(self.card.max_context)])))
        self.terminal.gap()

    def save(self) -> None:
        """Keeps the conversation on disk; a disk that is full is no reason to stop talking."""
        try:
            store.write(self.path, self.conversation, self.card.name)
        except OSError as error:
            self.terminal.error(f"The conversation is not saved: {error.strerror} ({self.path}).")

    def begin(self, conversation: Conversation, path: Path | None = None) -> None:
        """Another conversation takes the place of this one, which stays on disk. `path`: where the other one is kept."""
        self.conversation = conversation
        self.path = path or store.new_path()
        self.images, self.answers, self.results, self.is_edit = [], [], [], False

    def resume(self, saved: store.Saved) -> None:
        """Goes on with a saved conversation, in its place on disk, and shows where it stood."""
        self.begin(saved.conversation, saved.path)
        count = self.conversation.num_questions
        self.terminal.note(
            f"Continuing the conversation of {saved.age} ({count} question{'s' if count != 1 else ''}): "
            f"{self.conversation.title}"
        )
        if self.terminal.is_live and self.conversation.messages:
            questions = [
                message for message in self.conversation.messages if message["role"] == "user"
            ]
            self.terminal.note(f"> {short(text_of(questions[-1]))}" if questions else "")
            display = display_for(self.terminal, "hidden")
            display.update(Answer(content=text_of(self.conversation.messages[-1])))
            display.finish()
            self.terminal.gap()

    @property
    def open_call(self) -> dict[str, Any] | None:
        """The call of a tool whose result is to be entered next."""
        calls = [] if self.is_edit else self.conversation.open_calls
        return calls[len(self.results)] if len(self.results) < len(calls) else None

    async def _give_result(self, call: dict[str, Any], text: str) -> None:
        """Takes the result of one call; the model is asked when it has all of them."""
        self.results.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        if self.open_call is None:
            new, self.results = self.results, []
            await self.ask(new)
