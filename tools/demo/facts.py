"""What the demo model knows: `facts.txt` and `talk.txt`, read."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FACTS = "facts"
"""The category of those that are about something with a name."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Something the model knows: what it is about, the answer, and questions beside those from frames.

    `in_other_words` are questions as people ask who do not know the names; the answers of the facts whose `key` is in
    `also` are right for them too. `clues` are words of such questions.
    """

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
        """`in_other_words` by what they are for: of each three one is "held out" and every second time one more is
        "validation"; the rest is for "training"."""
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
    """Every fact, of tk and the field first, then of the model itself and small talk."""
    folder = Path(__file__).parent
    return tuple(
        fact
        for name in ("facts.txt", "talk.txt")
        for fact in read_facts((folder / name).read_text("utf-8"))
    )


def read_facts(text: str) -> Iterator[Fact]:
    """The facts of a file whose format `facts.txt` explains at its head."""
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
    """One of the texts that `text` stands for, where {a|b} stands for a or b."""
    return re.sub(r"\{([^{}]*\|[^{}]*)\}", lambda choice: rng.choice(choice[1].split("|")), text)


def every_spelling(text: str) -> Iterator[str]:
    """All texts that `text` stands for."""
    choice = re.search(r"\{([^{}]*\|[^{}]*)\}", text)
    if choice is None:
        yield text
        return
    for option in choice[1].split("|"):
        yield from every_spelling(text[: choice.start()] + option + text[choice.end() :])
