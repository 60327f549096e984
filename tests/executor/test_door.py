"""Channels between machines: who may come in, and what is noticed."""

from __future__ import annotations

import socket
import threading

import pytest

from toolkit.executor.channel import Channel
from toolkit.executor.door import KEY_SIZE, Door, call
from toolkit.executor.messages import Beat, Broken, decode_from_rank, encode

HOST = "127.0.0.1"


@pytest.fixture
def door():
    door = Door(HOST)
    yield door
    door.close()


def in_thread(function, *arguments) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def test_those_that_know_the_key_come_in_under_their_numbers(door):
    callers: dict[int, Channel] = {}
    threads = [
        in_thread(lambda rank=rank: callers.update({rank: call(HOST, door.port, door.key, rank)}))
        for rank in range(3)
    ]
    admitted = door.admit(range(3), 20, lambda: None)
    for thread in threads:
        thread.join(20)
    for rank in range(3):
        callers[rank].send(Beat(rank, 10 + rank))
        assert decode_from_rank(admitted[rank].receive()) == Beat(rank, 10 + rank)


def test_strangers_stay_outside_and_do_not_keep_others_from_coming_in(door):
    """One has another key, one another number, one says nonsense, one leaves, one comes twice."""
    admitted: dict[int, Channel] = {}
    waiting = in_thread(lambda: admitted.update(door.admit([0, 1], 20, lambda: None)))
    outside = [call(HOST, door.port, b"x" * KEY_SIZE, 0), call(HOST, door.port, door.key, 7)]
    with socket.create_connection((HOST, door.port)) as nonsense:
        nonsense.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:1234567890\r\n\r\n")
    socket.create_connection((HOST, door.port)).close()
    first = call(HOST, door.port, door.key, 0)
    outside.append(call(HOST, door.port, door.key, 0))
    call(HOST, door.port, door.key, 1)
    waiting.join(20)
    assert sorted(admitted) == [0, 1]
    admitted[0].send_bytes(encode(Beat(0, 5)))
    assert decode_from_rank(first.receive()) == Beat(0, 5)
    for stranger in outside:
        with pytest.raises(EOFError):
            stranger.receive()


def test_who_has_heard_a_proof_cannot_use_it_again(door):
    heard = bytearray()

    def relay() -> None:
        """Between a caller and the door, and hears both."""
        caller, _ = between.accept()
        with caller, socket.create_connection((HOST, door.port)) as onward:
            caller.sendall(onward.recv(KEY_SIZE, socket.MSG_WAITALL))
            heard.extend(caller.recv(8 + KEY_SIZE, socket.MSG_WAITALL))
            onward.sendall(heard)

    with socket.create_server((HOST, 0)) as between:
        relaying = in_thread(relay)
        calling = in_thread(lambda: call(HOST, between.getsockname()[1], door.key, 0))
        assert list(door.admit([0], 20, lambda: None)) == [0]
        relaying.join(20)
        calling.join(20)
    with socket.create_connection((HOST, door.port)) as again:
        again.sendall(heard)
        with pytest.raises(TimeoutError, match="rank 0"):
            door.admit([0], 0.1, lambda: None)


def test_who_waits_for_a_rank_that_has_ended_is_told(door):
    def look() -> None:
        raise LookupError("rank 1 ended")

    with pytest.raises(LookupError, match="rank 1 ended"):
        door.admit([1], 20, look)


def test_the_last_word_arrives_though_more_was_sent_than_read(door):
    """A connection that is closed with something unread is reset, and what is under way is lost."""
    admitted: dict[int, Channel] = {}
    waiting = in_thread(lambda: admitted.update(door.admit([0], 20, lambda: None)))
    rank = call(HOST, door.port, door.key, 0)
    waiting.join(20)
    admitted[0].send_bytes(b"never read" * 10_000)
    rank.send(Broken(0, "", "why" * 10_000))
    ending = in_thread(rank.finish)
    assert decode_from_rank(admitted[0].receive()) == Broken(0, "", "why" * 10_000)
    admitted[0].close()
    ending.join(20)
    assert not ending.is_alive()
