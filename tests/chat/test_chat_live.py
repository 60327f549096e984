"""Live display of waiting, reasoning and tool calls; the clipboard."""

from __future__ import annotations

import base64
import re

import pytest

from tests.chat.emulator import Emulator
from toolkit.chat.answers.answer_view import Answer
from toolkit.chat.answers.delta import CallPart, ChatDelta, FunctionPart
from toolkit.chat.screen import clipboard
from toolkit.chat.screen.live import SPINNER_DELAY, LiveDisplay
from toolkit.errors import InvalidRequestError

REASONING = " ".join(f"thought{number}" for number in range(100))


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "COLUMNS", "LINES", "WAYLAND_DISPLAY", "DISPLAY", "TMUX"):
        monkeypatch.delenv(name, raising=False)


class Show:
    """An answer on a terminal, with control over the time."""

    def __init__(self, reasoning: str = "short", language: str | None = None) -> None:
        self.emulator = Emulator(80, 20)
        self.display = LiveDisplay(self.emulator.terminal, reasoning, language)
        self.answer = Answer()

    def add(self, **delta) -> None:
        self.answer.add(ChatDelta(**delta))
        self.display.update(self.answer)
        self.display.refresh()

    def wait(self) -> None:
        self.display._began -= 2 * SPINNER_DELAY
        self.display.refresh()


def test_spinner_appears_late_and_leaves_no_trace():
    show = Show()
    show.display._began += 1000 * SPINNER_DELAY
    show.display.refresh()
    assert show.emulator.text == ""
    show.display._began -= 1000 * SPINNER_DELAY
    show.wait()
    assert "waiting" in show.emulator.text
    show.add(content="Here.")
    assert show.emulator.lines == ["Here."]


def test_display_without_an_answer_is_empty():
    show = Show()
    show.wait()
    show.display.finish()
    assert show.emulator.lines == []


def test_reasoning_shows_its_last_lines_until_it_is_folded():
    show = Show()
    show.add(reasoning=REASONING)
    show.wait()
    head, *rest = show.emulator.lines
    assert "thinking" in head
    assert rest[-1].endswith("thought99")
    assert len(rest) == 6
    assert all(char.italics for char in show.emulator.styles_of("thought99"))
    show.add(content="Yes.")
    fold, gap, content = show.emulator.lines
    pattern = r"▸ thought for \d\.\d s, 100 words \(Ctrl-T or /show reasoning shows it\)"
    assert re.fullmatch(pattern, fold)
    assert (gap, content) == ("", "Yes.")


def test_reasoning_full_stays_and_hidden_never_appears():
    full, hidden = Show("full"), Show("hidden")
    for show in (full, hidden):
        show.add(reasoning=REASONING)
        show.wait()
        show.add(content="Yes.")
        show.display.finish()
    assert " ".join(full.emulator.text.split()[:100]) == REASONING
    assert not any("thought0" in text or "thought99" in text for text in hidden.emulator.written)
    assert full.emulator.lines[-1] == hidden.emulator.lines[-1] == "Yes."


def test_reasoning_is_folded_without_an_answer():
    show = Show()
    show.add(reasoning=REASONING)
    show.display.finish()
    assert show.emulator.lines[0].startswith("▸ thought for")


def test_tool_call_grows_below_the_text():
    show = Show()
    show.add(content="Let me see.")
    show.add(calls=(CallPart(0, "a", FunctionPart("get_weather", '{"city": ')),))
    assert show.emulator.lines == ["Let me see.", "", '→ get_weather({"city": )']
    show.add(calls=(CallPart(0, None, FunctionPart(None, '"Paris"}')),))
    show.display.finish()
    assert show.emulator.lines == ["Let me see.", "", '→ get_weather({"city": "Paris"})']


def test_json_answer_is_shown_as_code():
    show = Show(language="json")
    show.add(content='{"a": "*not* emphasis"')
    show.add(content="}")
    show.display.finish()
    assert show.emulator.lines == ['  {"a": "*not* emphasis"}']


def test_redraw_after_other_output_repeats_the_open_block():
    show = Show()
    show.add(content="One\n\nTwo")
    show.emulator.write("\r\nshell$ fg\r\n")
    show.display.redraw()
    show.add(content=" three")
    assert show.emulator.lines == ["One", "", "Two", "shell$ fg", "One", "", "Two three"]


def test_copy_without_a_program_uses_the_terminal(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    emulator = Emulator()
    assert "4 characters" in clipboard.copy("wörd", emulator.terminal)
    assert emulator.written == ["\x1b]52;c;" + base64.b64encode("wörd".encode()).decode() + "\x07"]


def test_copy_uses_a_desktop_program(monkeypatch, tmp_path, screen):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("DISPLAY", ":0")
    (tmp_path / "xclip").write_text(f"#!/bin/sh\ncat > {tmp_path}/copied\n")
    (tmp_path / "xclip").chmod(0o755)
    assert "(xclip)" in clipboard.copy("wörd", screen.terminal)
    assert (tmp_path / "copied").read_text() == "wörd"


def test_copy_without_clipboard_is_an_error(monkeypatch, tmp_path, screen):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidRequestError, match="No clipboard"):
        clipboard.copy("text", screen.terminal)
