"""What is around the text of an answer on a terminal: the wait, the reasoning, calls of tools; and the clipboard."""

from __future__ import annotations

import base64
import re

import pytest

from tests.chat.emulator import Emulator
from toolkit.chat.answer_view import Answer
from toolkit.chat.delta import CallPart, Delta, FunctionPart
from toolkit.chat.screen import clipboard
from toolkit.chat.screen.live import PATIENCE, LiveDisplay
from toolkit.errors import InvalidRequestError

THOUGHT = " ".join(f"thought{number}" for number in range(100))


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "COLUMNS", "LINES", "WAYLAND_DISPLAY", "DISPLAY", "TMUX"):
        monkeypatch.delenv(name, raising=False)


class Show:
    """An answer on a terminal, of which time can be told to pass."""

    def __init__(self, reasoning: str = "short", language: str | None = None) -> None:
        self.emulator = Emulator(80, 20)
        self.display = LiveDisplay(self.emulator.terminal, reasoning, language)
        self.answer = Answer()

    def add(self, **delta) -> None:
        self.answer.add(Delta(**delta))
        self.display.update(self.answer)
        self.display.refresh()

    def wait(self) -> None:
        self.display._began -= 2 * PATIENCE
        self.display.refresh()


def test_a_wait_is_shown_when_it_is_one_and_leaves_no_trace():
    show = Show()
    show.display._began += 1000 * PATIENCE
    show.display.refresh()
    assert show.emulator.text == ""
    show.display._began -= 1000 * PATIENCE
    show.wait()
    assert "waiting" in show.emulator.text
    show.add(content="Here.")
    assert show.emulator.lines == ["Here."]


def test_an_answer_that_never_comes_leaves_no_trace():
    show = Show()
    show.wait()
    show.display.finish()
    assert show.emulator.lines == []


def test_of_reasoning_its_end_is_seen_until_it_folds():
    show = Show()
    show.add(reasoning=THOUGHT)
    show.wait()
    head, *rest = show.emulator.lines
    assert "thinking" in head
    assert rest[-1].endswith("thought99")
    assert len(rest) == 6
    assert all(char.italics for char in show.emulator.styles_of("thought99"))
    show.add(content="Yes.")
    fold, gap, said = show.emulator.lines
    assert re.fullmatch(
        r"▸ thought for \d\.\d s, 100 words: Ctrl-T or /show reasoning unfolds it", fold
    )
    assert (gap, said) == ("", "Yes.")


def test_reasoning_in_full_stays_and_hidden_is_never_seen():
    full, hidden = Show("full"), Show("hidden")
    for show in (full, hidden):
        show.add(reasoning=THOUGHT)
        show.wait()
        show.add(content="Yes.")
        show.display.finish()
    assert " ".join(full.emulator.text.split()[:100]) == THOUGHT
    assert not any("thought0" in text or "thought99" in text for text in hidden.emulator.written)
    assert full.emulator.lines[-1] == hidden.emulator.lines[-1] == "Yes."


def test_reasoning_that_is_stopped_is_folded_too():
    show = Show()
    show.add(reasoning=THOUGHT)
    show.display.finish()
    assert show.emulator.lines[0].startswith("▸ thought for")


def test_a_call_of_a_tool_grows_below_the_text():
    show = Show()
    show.add(content="Let me see.")
    show.add(calls=(CallPart(0, "a", FunctionPart("get_weather", '{"city": ')),))
    assert show.emulator.lines == ["Let me see.", "", '→ get_weather({"city": )']
    show.add(calls=(CallPart(0, None, FunctionPart(None, '"Paris"}')),))
    show.display.finish()
    assert show.emulator.lines == ["Let me see.", "", '→ get_weather({"city": "Paris"})']


def test_json_that_was_asked_for_is_shown_as_code():
    show = Show(language="json")
    show.add(content='{"a": "*not* emphasis"')
    show.add(content="}")
    show.display.finish()
    assert show.emulator.lines == ['  {"a": "*not* emphasis"}']


def test_after_something_else_was_written_the_open_block_is_drawn_again():
    show = Show()
    show.add(content="One\n\nTwo")
    show.emulator.write("\r\nshell$ fg\r\n")
    show.display.redraw()
    show.add(content=" three")
    assert show.emulator.lines == ["One", "", "Two", "shell$ fg", "One", "", "Two three"]


def test_without_a_program_the_terminal_is_asked_to_copy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    emulator = Emulator()
    assert "4 characters" in clipboard.copy("wörd", emulator.terminal)
    assert emulator.written == ["\x1b]52;c;" + base64.b64encode("wörd".encode()).decode() + "\x07"]


def test_a_program_of_the_desktop_copies_where_there_is_one(monkeypatch, tmp_path, screen):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("DISPLAY", ":0")
    (tmp_path / "xclip").write_text(f"#!/bin/sh\ncat > {tmp_path}/copied\n")
    (tmp_path / "xclip").chmod(0o755)
    assert "(xclip)" in clipboard.copy("wörd", screen.terminal)
    assert (tmp_path / "copied").read_text() == "wörd"


def test_without_any_way_to_copy_that_is_said(monkeypatch, tmp_path, screen):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidRequestError, match="no clipboard"):
        clipboard.copy("text", screen.terminal)
