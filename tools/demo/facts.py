"""Facts that the demo model knows, read from `facts.txt` and `talk.txt`."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FACTS = "facts"
"""Category of facts about something with a name."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact: its names, its answer, and questions in addition to those from frames.

    `in_other_words`: questions of people who do not know the names. For these the answers of the
    facts with a `key` in `also` are right too. `clues`: words of such questions."""

    key: str
    kind: str
    noun: str
    category: str
    names: tuple[str, ...]
    answer: str
    asks: tuple[str, ...] = ()
    held_out_asks: tuple[str, ...] = ()
    in_other_words: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    clues: tuple[str, ...] = ()

    def split(self, seed: int) -> dict[str, tuple[str, ...]]:
        """Split `in_other_words` into "held out", "validation" and "training".

        Of every three, one is held out. A second one is for validation in half of the cases."""
        parts: dict[str, list[str]] = {"held out": [], "validation": [], "training": []}
        for start in range(0, len(self.in_other_words), 3):
            three = self.in_other_words[start : start + 3]
            rng = random.Random(f"split {seed} {self.answer} {start}")
            places = ["held out", rng.choice(("validation", "training")), "training"][
                : max(len(three), 3 * (start > 0))
            ]
            rng.shuffle(places)
            for place, text in zip(places, three, strict=False):
                parts[place].append(text)
        return {part: tuple(texts) for part, texts in parts.items()}


@cache
def facts() -> tuple[Fact, ...]:
    """Return all facts: on tk and the field, then on the model itself and small talk."""
    folder = Path(__file__).parent
    return tuple(
        fact
        for name in ("facts.txt", "talk.txt")
        for fact in read_facts((folder / name).read_text("utf-8"))
    )


def read_facts(text: str) -> Iterator[Fact]:
    """Yield the facts in a file. Its format is explained at the top of `facts.txt`."""
    sections = re.split(r"^== ", text, flags=re.MULTILINE)[1:]
    for section in sections:
        header, _, body = section.partition("\n")
        kind, rest = header.split(" ", 1)
        noun, category = (rest, FACTS) if kind != "free" else ("", rest)
        for entry in re.split(r"\n\s*\n", body.strip()):
            yield from _facts_of_entry(kind, noun, category, entry.splitlines())


_MARKS = ("?", "??", "*", "+", "&", "=", "=*", "=&", "!", "~")


def _facts_of_entry(kind: str, noun: str, category: str, lines: list[str]) -> Iterator[Fact]:
    plain: list[str] = []
    marked: dict[str, list[str]] = {mark: [] for mark in _MARKS}
    for line in lines:
        mark, _, rest = line.partition(" ")
        if mark in marked:
            marked[mark].append(rest)
        else:
            plain.append(line)
    names = () if kind == "free" else tuple(plain[0].split(" | "))
    key = names[0].strip("`") if names else marked["?"][0]
    words, default_words = tuple(marked["*"]), tuple(marked["=*"])
    clues = tuple(clue for line in marked["+"] for clue in line.split(" | "))
    also, default_also = (
        tuple(name for line in marked[mark] for name in line.split(" | ")) for mark in ("&", "=&")
    )
    asks, held_out_asks = tuple(marked["?"]), tuple(marked["??"])
    if kind != "flag":
        yield Fact(
            key, kind, noun, category, names, plain[-1], asks, held_out_asks, words, also, clues
        )
        return
    wishes = tuple(marked["!"][0].split(" | "))
    default = f"{key} default"
    yield Fact(key, kind, noun, category, names, plain[-1], asks, held_out_asks)
    yield Fact(
        default,
        "default",
        noun,
        category,
        names,
        marked["="][0],
        (),
        (),
        default_words,
        default_also,
        clues,
    )
    yield Fact(
        key,
        "which flag",
        noun,
        category,
        wishes,
        marked["~"][0],
        (),
        (),
        words,
        (key, *also),
        clues,
    )


def spelled_out(rng: random.Random, text: str) -> str:
    """Replace each {a|b} in the text by a random one of its alternatives."""
    return re.sub(r"\{([^{}]*\|[^{}]*)\}", lambda choice: rng.choice(choice[1].split("|")), text)


def every_spelling(text: str) -> Iterator[str]:
    """Yield the text with every combination of its {a|b} alternatives."""
    choice = re.search(r"\{([^{}]*\|[^{}]*)\}", text)
    if choice is None:
        yield text
        return
    for option in choice[1].split("|"):
        yield from every_spelling(text[: choice.start()] + option + text[choice.end() :])
