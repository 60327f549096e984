"""Channels between machines: authentication, and lost or slow peers."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

import pytest

from toolkit.executor.channel import SocketChannel
from toolkit.executor.rank import RankProcess
from toolkit.executor.rank_messages import (
    Broken,
    Call,
    EndRank,
    Heartbeat,
    decode_from_rank,
    encode,
)
from toolkit.executor.tcp_channel import KEY_SIZE, TCPListener, call

HOST = "127.0.0.1"


@pytest.fixture
def listener():
    listener = TCPListener(HOST)
    yield listener
    listener.close()


def in_thread(function, *arguments) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def test_callers_with_the_key_are_accepted_by_rank(listener):
    callers: dict[int, SocketChannel] = {}
    threads = [
        in_thread(
            lambda rank=rank: callers.update({rank: call(HOST, listener.port, listener.key, rank)})
        )
        for rank in range(3)
    ]
    admitted = listener.accept(range(3), 20, lambda: None)
    for thread in threads:
        thread.join(20)
    for rank in range(3):
        callers[rank].send(Heartbeat(rank, 10 + rank))
        assert decode_from_rank(admitted[rank].receive()) == Heartbeat(rank, 10 + rank)


def test_strangers_are_rejected_and_do_not_block_others(listener):
    """Callers: silent, with a wrong key, with a wrong rank, not of this protocol, gone, twice."""
    silent = [socket.create_connection((HOST, listener.port)) for _ in range(3)]
    admitted: dict[int, SocketChannel] = {}
    waiting = in_thread(lambda: admitted.update(listener.accept([0, 1], 20, lambda: None)))
    rejected = [
        call(HOST, listener.port, b"x" * KEY_SIZE, 0),
        call(HOST, listener.port, listener.key, 7),
    ]
    with socket.create_connection((HOST, listener.port)) as other:
        other.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:1234567890\r\n\r\n")
    socket.create_connection((HOST, listener.port)).close()
    twice = [call(HOST, listener.port, listener.key, 0) for _ in range(2)]
    call(HOST, listener.port, listener.key, 1)
    waiting.join(20)
    assert sorted(admitted) == [0, 1]
    admitted[0].send_bytes(encode(Heartbeat(0, 5)))
    received = []
    for caller in twice:
        with suppress(EOFError):
            received.append(decode_from_rank(caller.receive()))
    assert received == [Heartbeat(0, 5)], "one of the two is accepted"
    for stranger in rejected:
        with pytest.raises(EOFError):
            stranger.receive()
    for stranger in silent:
        stranger.close()


def test_a_proof_cannot_be_replayed(listener):
    proof = bytearray()

    def relay() -> None:
        """Forward between a caller and the listener, and record the proof."""
        caller, _ = between.accept()
        with caller, socket.create_connection((HOST, listener.port)) as onward:
            caller.sendall(onward.recv(KEY_SIZE, socket.MSG_WAITALL))
            proof.extend(caller.recv(8 + KEY_SIZE, socket.MSG_WAITALL))
            onward.sendall(proof)

    with socket.create_server((HOST, 0)) as between:
        relaying = in_thread(relay)
        calling = in_thread(lambda: call(HOST, between.getsockname()[1], listener.key, 0))
        assert list(listener.accept([0], 20, lambda: None)) == [0]
        relaying.join(20)
        calling.join(20)
    with socket.create_connection((HOST, listener.port)) as again:
        again.sendall(proof)
        with pytest.raises(TimeoutError, match="rank 0"):
            listener.accept([0], 0.1, lambda: None)


def test_accept_raises_if_a_rank_has_ended(listener):
    def look() -> None:
        raise LookupError("rank 1 ended")

    with pytest.raises(LookupError, match="rank 1 ended"):
        listener.accept([1], 20, look)


def test_the_last_message_arrives_with_unread_data_in_the_socket(listener):
    """Closing a socket with unread data resets the connection and loses data in flight."""
    admitted: dict[int, SocketChannel] = {}
    waiting = in_thread(lambda: admitted.update(listener.accept([0], 20, lambda: None)))
    rank = call(HOST, listener.port, listener.key, 0)
    waiting.join(20)
    admitted[0].send_bytes(b"never read" * 10_000)
    rank.send(Broken(0, "", "why" * 10_000))
    ending = in_thread(rank.finish)
    assert decode_from_rank(admitted[0].receive()) == Broken(0, "", "why" * 10_000)
    admitted[0].close()
    ending.join(20)
    assert not ending.is_alive()


def test_a_long_step_does_not_break_the_connection(listener, monkeypatch):
    """TCP drops a peer whose receive window stays closed."""
    monkeypatch.setattr("toolkit.executor.tcp_channel.PEER_TIMEOUT", 2)
    ends: list[SocketChannel] = []
    calling = in_thread(lambda: ends.append(call(HOST, listener.port, listener.key, 0)))
    ours = listener.accept([0], 20, lambda: None)[0]
    calling.join(20)
    rank, received, computed = RankProcess(ends[0], far=True), [], threading.Event()

    def serve() -> None:
        computed.wait(20)
        received.extend(rank._receive() for _ in range(2))

    monkeypatch.setattr(rank, "_serve", serve)
    running = in_thread(rank.run)
    long = Call("x", ["y" * 8_000_000])
    sending = in_thread(lambda: [ours.send(message) for message in (long, EndRank())])
    time.sleep(2.5)
    computed.set()
    running.join(20)
    sending.join(20)
    assert received == [long, EndRank()]
