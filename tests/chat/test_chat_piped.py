"""tk chat with pipes for stdin and stdout."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from tests.forked import ForkedProcess
from tests.pictures.samples import gradient, saved
from tests.server import until
from toolkit.chat import store
from toolkit.chat.history import Conversation


@pytest.fixture(autouse=True)
def directed(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TK_URL", server.url)


@pytest.fixture
def chat_process(fork_server):
    """Function that starts `tk chat` in a new process, with pipes for its streams."""

    def start(*flags: str) -> subprocess.Popen[bytes]:
        module = "toolkit" if fork_server is None else "tests.chat.forked_tk"
        command = [sys.executable, "-m", module, "chat", *flags]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        if fork_server is None:
            return subprocess.Popen(command, **pipes)
        return ForkedProcess(fork_server, command, **pipes, start_new_session=True)

    return start


@pytest.fixture
def tk(tk_here):
    def run(*flags: str, stdin: str = "Hi\nthere\n") -> subprocess.CompletedProcess[str]:
        return tk_here("chat", *flags, stdin=stdin)

    return run


def test_stdin_is_one_message_and_stdout_is_the_answer(server, tk):
    done = tk("--system", "Be brief.")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello, wörld.\n", "")
    assert [message["content"] for message in server.bodies[0]["messages"]] == [
        "Be brief.",
        "Hi\nthere",
    ]


@pytest.mark.parametrize(
    ("flags", "stdin", "asked"),
    [
        (("review this",), "+ a line\n", "review this\n\n+ a line"),
        (("fake", "Why?"), "", "Why?"),
        (("fake:latest",), "Why?", "Why?"),
        (("--prompt", "Why?"), "", "Why?"),
        (("What is it?",), "", "What is it?"),
        (("review",), "+ a line\n", "review\n\n+ a line"),
    ],
)
def test_question_comes_before_piped_text(server, tk, flags, stdin, asked):
    assert tk(*flags, stdin=stdin).stdout == "Hello, wörld.\n"
    assert server.bodies[0]["messages"] == [{"role": "user", "content": asked}]
    assert server.bodies[0]["model"] == "fake"


@pytest.mark.parametrize(
    ("flags", "stdin", "text"),
    [
        (("What is this? {path}",), "", "What is this?"),
        (("fake", "{path}"), "", None),
        (("Which of these is it? {path}",), "A or B", "Which of these is it?\n\nA or B"),
    ],
)
def test_image_at_the_end_of_the_question_is_attached(server, tk, tmp_path, flags, stdin, text):
    server.refuse_images = False
    path = tmp_path / "dot.png"
    path.write_bytes(saved(gradient(5, 3)))
    done = tk(*(flag.format(path=path) for flag in flags), stdin=stdin)
    assert (done.stdout, done.stderr) == ("Hello, wörld.\n", "[image dot.png 5x3]\n")
    image, *rest = server.bodies[-1]["messages"][0]["content"]
    assert image["type"] == "image_url"
    assert rest == ([] if text is None else [{"type": "text", "text": text}])


def test_image_that_is_not_attached_is_text(server, tk, tmp_path):
    path = tmp_path / "dot.png"
    path.write_bytes(saved(gradient(5, 3)))
    refused = tk(f"What is {path}", stdin="")
    assert "fake accepts no images: " in refused.stderr
    assert "The path is sent as text." in refused.stderr
    server.refuse_images = False
    assert tk("Describe it", stdin=f"see {path}").stderr == ""  # anyone may have written it
    contents = [body["messages"][0]["content"] for body in server.bodies]
    assert contents[-2:] == [f"What is {path}", f"Describe it\n\nsee {path}"]


def test_markdown_and_escape_codes_are_piped_unchanged(server, tk):
    server.pieces = ["# **A** ", "\x1b[1mb\x1b[0m\n"]
    done = tk()
    assert (done.stdout, done.stderr) == ("# **A** \x1b[1mb\x1b[0m\n", "")


def test_characters_missing_in_the_encoding_are_replaced(server, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    server.pieces = ["wörld 🎉"]
    command = [sys.executable, "-m", "toolkit", "chat", "What is it?"]
    assert subprocess.check_output(command, input=b"", timeout=200) == b"w?rld ?\n"


def test_question_with_invalid_bytes_has_them_replaced(server, tk):
    assert tk(b"caf\xe9 or tea?".decode(errors="surrogateescape"), stdin="").returncode == 0
    assert server.bodies[0]["messages"][0]["content"] == "caf? or tea?"


def test_json_has_the_answer_and_its_numbers(server, tk):
    server.pieces = [
        {"reasoning_content": "Hm."},
        0.05,
        "Yes.",
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]},
    ]

    def run_with_rate() -> subprocess.CompletedProcess[str] | None:
        """Return None if a busy machine read the answer at once: there is no rate."""
        done = tk("--json")
        return done if json.loads(done.stdout)["tokens_per_second"] is not None else None

    done = until(run_with_rate)
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert answer["time_to_first_token"] < answer["time"]
    assert answer["tokens_per_second"] > 0
    assert {
        key: answer[key]
        for key in ("model", "content", "reasoning", "finish_reason", "usage", "error")
    } == {
        "model": "fake",
        "content": "Yes.",
        "reasoning": "Hm.",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 5, "cached_tokens": 3, "completion_tokens": 42},
        "error": None,
    }
    assert answer["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_schema_is_sent_and_a_cut_answer_fails(server, tk, tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    server.pieces = ['{"a": ', "1}"]
    done = tk("--schema", "schema.json", "--no-stream")
    assert (done.returncode, done.stdout) == (0, '{"a": 1}\n')
    assert server.bodies[0]["stream"] is False
    assert server.bodies[0]["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
    }
    server.finish_reason = "length"
    done = tk("--schema", "schema.json")
    assert (done.returncode, done.stdout) == (1, '{"a": 1}\n')
    assert "cut" in done.stderr


def test_incomplete_answer_has_exit_code_1(server, tk):
    server.break_after = 2
    done = tk()
    assert (done.returncode, done.stdout) == (1, "Hello, \n")
    assert len(done.stderr.strip().splitlines()) == 1
    assert json.loads(tk("--json").stdout)["error"]


def test_key_comes_from_the_environment(server, tk, monkeypatch):
    server.api_key = "right"
    monkeypatch.setenv("TK_API_KEY", "right")
    assert tk().stdout == "Hello, wörld.\n"


def test_errors_are_one_line_on_stderr(server, tk, unused_tcp_port):
    for flags, message in (
        (
            ("a/b",),
            "No model a/b. (a/b was read as a model name; --prompt a/b asks a question.)",
        ),
        (("--url", f"127.0.0.1:{unused_tcp_port}"), "No server answers at"),
        (("--schema", "missing.json"), "cannot read missing.json"),
        (("--continue",), "There is no saved conversation"),
    ):
        done = tk(*flags)
        assert done.returncode == 2
        assert done.stdout == ""
        assert message in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    for flags, problem in (
        ((), 'Give one: tk chat "Who are you?"'),
        (("a/b",), "'a/b' is taken as the model: there is no question. Give one: tk chat a/b PROM"),
        (("a/b",), "If 'a/b' is the question: tk chat --prompt a/b\n"),
    ):
        done = tk(*flags, stdin="  \n")
        assert (done.returncode, done.stdout) == (2, "")
        assert problem in done.stderr


def test_continue_resumes_the_last_conversation(server, tk):
    path = store.new_path()
    messages = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}]
    store.write(path, Conversation("Be kind.", messages), "fake")
    assert tk("-c", "And then", stdin="what?").returncode == 0
    assert [message["content"] for message in server.bodies[0]["messages"]] == [
        "Be kind.",
        "One",
        "Two",
        "And then\n\nwhat?",
    ]
    assert [message["content"] for message in store.read(path).conversation.messages][2:] == [
        "And then\n\nwhat?",
        "Hello, wörld.",
    ]
    assert tk("-c", "--system", "Be brief.", stdin="And?").returncode == 0
    assert server.bodies[1]["messages"][0]["content"] == "Be brief."
    assert tk(stdin="Something else").returncode == 0
    assert len(store.newest(5)) == 1  # single questions are not saved


def test_ctrl_c_writes_the_partial_answer_and_exits_with_130(server, chat_process):
    server.stall_after = 2
    with chat_process("What is it?") as chat:
        chat.stdin.close()
        assert server.stalled.wait(90)
        received = b""
        while received != b"Hello, ":
            received += chat.stdout.read1(100)
        chat.send_signal(signal.SIGINT)
        assert (chat.stdout.read(), chat.wait(90)) == (b"\n", 130)
    assert server.disconnected.wait(90)


def test_closed_stdout_is_no_error(server, chat_process):
    server.pieces = ["word "] * 20_000
    with chat_process() as chat:
        chat.stdin.write(b"Hi")
        chat.stdin.close()
        assert chat.stdout.read(5) == b"word "
        chat.stdout.close()
        assert chat.stderr.read() == b""
