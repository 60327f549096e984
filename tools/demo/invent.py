"""What the corpus makes up by rule: small sums and very short stories."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

SPELLINGS = {
    "+": ("{a} + {b}", "{a} plus {b}", "{a}+{b}"),
    "-": ("{a} - {b}", "{a} minus {b}", "{a}-{b}"),
    "x": ("{a} x {b}", "{a} times {b}", "{a} * {b}", "{a}*{b}"),
}


@dataclass(frozen=True, slots=True)
class Sum:
    a: int
    b: int
    sign: str

    @property
    def answer(self) -> str:
        result = {"+": self.a + self.b, "-": self.a - self.b, "x": self.a * self.b}[self.sign]
        return f"{self.a} {self.sign} {self.b} = {result}."

    @property
    def spellings(self) -> tuple[str, ...]:
        return tuple(form.format(a=self.a, b=self.b) for form in SPELLINGS[self.sign])


def sums() -> Iterator[Sum]:
    """Every sum that the model is meant to know: + and - up to 20, products up to 12 x 12."""
    for a in range(21):
        for b in range(21):
            yield Sum(a, b, "+")
            if b <= a:
                yield Sum(a, b, "-")
            if a <= 12 and b <= 12:
                yield Sum(a, b, "x")


def never_trained(sum_: Sum) -> bool:
    """Whether a sum is held out. One in twenty or so, together with its mirror image."""
    low, high = sorted((sum_.a, sum_.b))
    return (low * 31 + high * 17 + ord(sum_.sign)) % 19 == 3


_HEROES = """
cat dog fox mouse bird horse rabbit bear frog duck hen goat sheep cow pig lion tiger monkey elephant whale
fish snail turtle spider bee ant butterfly owl crow penguin robot dragon knight princess king queen witch
wizard giant farmer baker sailor teacher painter gardener pirate girl boy child grandmother cloud star tree
flower river snowman mountain boat train car clock lamp book computer server scheduler token kernel model
toy teapot camel deer eagle parrot swan hamster kitten puppy lizard crab shark dolphin seal zebra giraffe
panda koala beetle worm cook tailor miller hunter soldier nurse student singer dancer thief judge captain
shepherd man woman baby brother sister uncle stone leaf seed apple pumpkin mushroom spoon chair door window
bridge house castle tower road island wave shadow candle mirror key bell drum violin kite balloon bicycle
bus plane rocket engine printer phone radio cache batch queue prompt graph number letter word poem dream
song
"""
HEROES = tuple(_HEROES.split())
HELD_OUT_HEROES = ("wolf", "squirrel", "doctor", "donkey", "ghost", "moon")
HELD_OUT_NAMES = ("Bolu", "Tamiro", "Neka", "Sufi", "Koralo", "Mira")

_TRAITS = (
    "small",
    "old",
    "brave",
    "shy",
    "clever",
    "happy",
    "quiet",
    "curious",
    "lazy",
    "friendly",
    "hungry",
)
_PLACES = (
    "by the sea",
    "in a dark forest",
    "on a green hill",
    "in a small house",
    "near a big city",
    "at the end of a long road",
    "under a bridge",
    "in a quiet garden",
)
_EVENTS = (
    (
        "found a golden key in the grass",
        "The key opened a little door, and behind the door there was a room full of light.",
    ),
    (
        "met a stranger who had lost the way",
        "They walked together until evening, and then they were friends.",
    ),
    (
        "heard a song from far away",
        "{hero} followed the song over three hills and found a party with many friends.",
    ),
    ("lost a red hat in the wind", "A kind bird brought the hat back, and they shared some bread."),
    (
        "wanted to see the whole world",
        "After a long journey {hero} came home and said that home was best.",
    ),
    (
        "could not sleep",
        "So {hero} counted the stars until morning, and there were more stars than numbers.",
    ),
    (
        "found an old map",
        "The map led to a tree, and under the tree there was a box of sweet apples.",
    ),
    (
        "helped a tired traveller carry a bag",
        "In the bag there was a lamp, and the traveller gave it away with thanks.",
    ),
)
_ENDINGS = (
    "From that day on nobody was lonely.",
    "And that is the end of the story.",
    "They all lived happily ever after.",
    "And everybody slept well that night.",
)


def invented_name(rng: random.Random) -> str:
    """A name of two or three syllables, such as Kamilo."""
    while True:
        syllables = (
            rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.choice((2, 2, 3)))
        )
        name = "".join(syllables).capitalize()
        if name not in HELD_OUT_NAMES:
            return name


def story(rng: random.Random, hero: str, name: str = "") -> str:
    """A story of four sentences about `hero`, perhaps called `name`."""
    trait, place = rng.choice(_TRAITS), rng.choice(_PLACES)
    event, outcome = rng.choice(_EVENTS)
    called, who = (f" called {name}", name) if name else ("", f"the {hero}")
    return (
        f"Once there was {article(trait)} {trait} {hero}{called} who lived {place}. "
        f"One day {who} {event}. {_capital(outcome.format(hero=who))} {rng.choice(_ENDINGS)}"
    )


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
