"""Places that users of the same thing share."""

from toolkit.scheduler.places import Places


def test_things_that_wait_take_turns():
    """Two things wait. The first of them to enter is then used without a pause."""
    places = Places[str](1)
    places.enter("a")
    for key in ("b", "c"):
        places.wait(key, key)
    places.leave("a")
    assert places.take_waiting() == ["b"]
    places.enter("b")
    assert places.take_waiting() == []
    assert not places.has_room("b")
    places.leave("b")
    assert places.take_waiting() == ["c"]
    assert places.enter("c").replaced == "b"
    assert not places.has_waiting
