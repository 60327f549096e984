"""Conversations that fill the model's context, with a real server and the demo model."""

from __future__ import annotations

import dataclasses

import pytest

from toolkit.chat.answers.client import Address, ChatClient
from toolkit.chat.commands import handle_line
from toolkit.chat.session import Session
from toolkit.config.clients import ChatConfig

QUESTIONS = ["What is a KV cache?", "What is a token?", "Who are you?", "What is paged attention?"]
LONG = "More about this word: " + "cache " * 80


@pytest.fixture
async def start(real, screen):
    """Function that starts a chat."""
    [model] = Address(real.url).list_models()
    client = ChatClient(Address(real.url))

    def make(*, knows_size: bool = True, **settings) -> Session:
        known = model if knows_size else dataclasses.replace(model, max_context=None)
        return Session(client, known, ChatConfig(temperature=0.0, **settings), screen.terminal)

    yield make
    await client.close()


@pytest.mark.parametrize("knows_size", [True, False])
async def test_oldest_turns_are_left_out(start, screen, knows_size):
    session = start(knows_size=knows_size)
    for number in range(12):
        await handle_line(session, f"{QUESTIONS[number % 4]} {'So? ' * 8}")
        assert session.answers[-1].error is None
        assert session.answers[-1].content
    assert "turn is left out" in screen.stderr or "turns are left out" in screen.stderr
    assert 0 < session.conversation.skipped < len(session.conversation.messages) == 24
    assert session.conversation.messages[session.conversation.skipped]["role"] == "user"
    if knows_size:
        await handle_line(session, "/retry")
        assert session.answers[-1].error is None


async def test_question_longer_than_the_context_names_a_way_out(start, screen):
    session = start()
    await handle_line(session, QUESTIONS[0])
    await handle_line(session, LONG * 6)
    assert session.answers[-1].exceeds_context
    assert "/clear starts a new conversation." in screen.stderr


async def test_policy_stop_leaves_nothing_out(start, screen):
    session = start(context_policy="stop")
    for _ in range(12):
        await handle_line(session, LONG)
        if session.answers[-1].exceeds_context:
            break
    assert session.answers[-1].exceeds_context
    assert session.conversation.skipped == 0
    assert "left out" not in screen.stderr
    assert "/clear starts a new" in screen.stderr


async def test_continue_is_offered_only_where_it_works(start, screen):
    session = start(context_policy="stop")
    await handle_line(session, LONG)
    session.context.used, session.answers[-1].finish_reason = session.model.max_context, "length"
    session.report(session.answers[-1])
    assert "cut at the end of the context (/clear starts a new conversation)" in screen.stderr
    session.context.used = int(0.9 * session.model.max_context)
    session.report(session.answers[-1])
    assert "cut at the token limit (/continue)" in screen.stderr
    assert "90% of the context is used: /clear starts a new one" in screen.stderr
