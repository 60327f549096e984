"""A limited number of places, which users of the same thing share."""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

U = TypeVar("U")


@dataclass(slots=True)
class Place:
    """A place and what is in it."""

    number: int  # from 0
    num_users: int = 0
    is_leaving: bool = False  # no user is added: something else waits for the place


@dataclass(slots=True)
class Entry:
    """The place that a user got."""

    number: int
    is_new: bool = False  # the place had nothing or something else in it
    replaced: str | None = None


class Places(Generic[U]):
    """Keeps things in places while they are used, and after that the most recently used ones.

    The engine keeps adapters in the host's memory by one of these, and the scheduler keeps them in
    the devices' slots by another. If every place is in use, users of other things wait. The thing
    that was taken up longest ago then gets no new users, so that its place becomes free however
    many want to use it."""

    def __init__(self, count: int) -> None:
        self._unused = list(range(count - 1, -1, -1))
        self._places: OrderedDict[str, Place] = OrderedDict()  # by key, least recently used first
        self._waiting: dict[str, list[U]] = {}  # users by key, in order of arrival

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def num_users(self, key: str) -> int:
        return self._places[key].num_users if key in self._places else 0

    def has_room(self, key: str) -> bool:
        """Return True if a user of this thing could enter now."""
        place = self._places.get(key)
        if place is not None:
            return not (place.is_leaving and place.num_users)
        return bool(self._unused) or any(not one.num_users for one in self._places.values())

    def enter(self, key: str) -> Entry:
        """Add a user of a thing, which gets a place if it has none. Needs `has_room`."""
        place = self._places.get(key)
        if place is not None:
            place.is_leaving = False
            place.num_users += 1
            self._places.move_to_end(key)
            return Entry(place.number)
        replaced = None
        if self._unused:
            number = self._unused.pop()
        else:
            replaced = next(one for one, place in self._places.items() if not place.num_users)
            number = self._places.pop(replaced).number
        self._places[key] = Place(number, num_users=1)
        return Entry(number, is_new=True, replaced=replaced)

    def leave(self, key: str) -> None:
        """Remove a user. The thing keeps its place until another needs it."""
        self._places[key].num_users -= 1

    def remove(self, key: str) -> None:
        """Empty a place without users."""
        self._unused.append(self._places.pop(key).number)

    def clear(self) -> None:
        """Empty all places, which have no users."""
        for key in list(self._places):
            self.remove(key)

    def wait(self, key: str, user: U) -> None:
        """Let a user wait for room."""
        self._waiting.setdefault(key, []).append(user)
        self._choose_leaving()

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def take_waiting(self) -> list[U]:
        """Return the users of one thing that have waited, if there is room for it now."""
        for key in self._waiting:
            if self.has_room(key):
                return self._waiting.pop(key)
        if self._waiting:  # what has entered since they began to wait leaves for them, too
            self._choose_leaving()
        return []

    def _choose_leaving(self) -> None:
        """Let one place become free for each thing that waits and has none."""
        num_leaving = sum(place.is_leaving for place in self._places.values())
        num_waiting = sum(one not in self._places for one in self._waiting)
        staying = (place for place in self._places.values() if not place.is_leaving)
        for place in islice(staying, max(0, num_waiting - num_leaving)):
            place.is_leaving = True
