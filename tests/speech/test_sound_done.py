"""Estimates of how much of a file is transcribed."""

import pytest

from toolkit.speech.sound_done import SoundDone
from toolkit.speech.transcript import WindowText


def test_windows_count_in_any_order_and_by_their_tokens():
    done = SoundDone([30.0, 30.0, 10.0])
    assert done.seconds == 0.0
    done.add(1, 40, None)
    assert done.seconds == 10.0  # of a speech with four tokens a second
    done.add(2, 20, WindowText(start=60.0, end=70.0))
    assert done.seconds == 10.0 + 20.0  # two tokens a second
    done.add(0, 1000, None)
    assert done.seconds == 10.0 + 20.0 + 27.0
    done.add(0, 0, WindowText(start=0.0, end=12.0))  # the rest is one more
    assert done.seconds == 57.0  # does not fall
    done.add(0, 3, WindowText(start=12.0, end=30.0))
    done.add(1, 0, WindowText(start=30.0, end=60.0))
    assert done.seconds == pytest.approx(70.0)
