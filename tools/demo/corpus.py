"""The demo model's corpus: conversations made from `facts` and `invent`, and held-out questions.

Everything is determined by the seed. Held out are complete frames (see `frames`), a third of the
questions that ask for a fact in other words than its names, some sums and some heroes of stories.
No held-out question occurs in the training part, in any case or punctuation. To choose between
recipes without the held-out questions, train with `validation`: this also leaves out the questions
of `validation_questions`."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from tools.demo import elsewhere
from tools.demo.facts import FACTS, Fact, every_spelling, facts, spelled_out
from tools.demo.frames import (
    CLUE_QUESTIONS,
    COMPARISONS,
    DEFAULT_QUESTIONS,
    FRAMES,
    STORY_REQUEST,
    STRAY_WORDS,
    THINGS,
)
from tools.demo.invent import (
    HELD_OUT_HEROES,
    HELD_OUT_NAMES,
    HEROES,
    Sum,
    article,
    invented_name,
    is_held_out,
    story,
    sums,
)
from tools.demo.words import keywords, reworded

LATER_FACTS = "facts, asked later in a chat"
OTHER_WORDS = "facts, asked in other words"
OFF_TOPIC = "off-topic"
ARITHMETIC, NEW_SUMS, STORIES = "arithmetic", "arithmetic, sums never trained", "stories"


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out question, its answer (for a story: the hero), and the chat before it.

    `how`: kind of novelty. `also_right`: other right answers."""

    category: str
    how: str
    text: str
    answer: str
    before: tuple[tuple[str, str], ...] = ()
    also_right: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """A conversation of (role, content) pairs. Plain text has the role "text"."""

    turns: tuple[tuple[str, str], ...]


@cache
def held_out(seed: int = 0) -> tuple[Question, ...]:
    """Return the questions that are never in the training part, as a person would type them."""
    rng = random.Random(f"held out {seed}")
    made: list[Question] = []
    for fact in facts():
        if fact.names:
            for frame in FRAMES[fact.kind].held_out:
                text = frame.format(x=rng.choice(fact.names), noun=fact.noun)
                made.append(Question(fact.category, "new frame", typed(rng, text), fact.answer))
        made.extend(_in_new_words(rng, fact, "new words", fact.held_out_asks))
        made.extend(_in_new_words(rng, fact, "other words", fact.split(seed)["held out"]))
    every = list(sums())
    for sum_ in every:
        if is_held_out(sum_):
            text = _framed(rng, "sum", rng.choice(sum_.spellings))
            made.append(Question(NEW_SUMS, "new sum", typed(rng, text), sum_.answer))
    for sum_ in rng.sample([s for s in every if not is_held_out(s)], 150):
        text = rng.choice(FRAMES["sum"].held_out).format(x=rng.choice(sum_.spellings))
        made.append(Question(ARITHMETIC, "new frame", typed(rng, text), sum_.answer))
    for hero in rng.sample(HEROES, 30):
        text = rng.choice(FRAMES["story"].held_out).format(x=f"{article(hero)} {hero}")
        made.append(Question(STORIES, "new frame", typed(rng, text), hero))
    for hero in HELD_OUT_HEROES:
        made.extend(
            Question(
                STORIES, "new hero", typed(rng, frame.format(x=f"{article(hero)} {hero}")), hero
            )
            for frame in FRAMES["story"].train[:5]
        )
    for name in HELD_OUT_NAMES:
        hero = rng.choice(HEROES)
        made.extend(
            Question(
                STORIES,
                "new name",
                typed(rng, frame.format(x=f"{article(hero)} {hero} called {name}")),
                name,
            )
            for frame in FRAMES["story"].train[:5]
        )
    made = list({normalise(question.text): question for question in made}.values())
    known = [question for question in made if question.category == FACTS]
    for first, then in zip(rng.sample(known, 150), rng.sample(known, 150), strict=True):
        before = ("user", first.text), ("assistant", first.answer)
        made.append(Question(LATER_FACTS, then.how, then.text, then.answer, before))
    return tuple(made)


def validation_questions(seed: int = 0) -> list[Question]:
    """Return the questions that training with `validation` leaves out in addition."""
    rng = random.Random(f"validation {seed}")
    return [
        question
        for fact in facts()
        for question in _in_new_words(rng, fact, "other words", fact.split(seed)["validation"])
    ]


def _in_new_words(
    rng: random.Random, fact: Fact, how: str, asks: Iterable[str]
) -> Iterator[Question]:
    """Yield questions about a fact that do not come from frames."""
    category = OTHER_WORDS if fact.category == FACTS else fact.category
    also_right = tuple(answer for key in fact.also for answer in _answers()[key])
    for ask in asks:
        text = typed(rng, with_mark(spelled_out(rng, ask)))
        yield Question(category, how, text, fact.answer, also_right=also_right)


@cache
def _answers() -> dict[str, tuple[str, ...]]:
    """Return the answers by the facts' keys. A flag has two."""
    answers: dict[str, tuple[str, ...]] = {}
    for fact in facts():
        answers[fact.key] = (*answers.get(fact.key, ()), fact.answer)
    return answers


@cache
def held_out_texts(seed: int = 0) -> frozenset[str]:
    """Return all normalised texts to keep out of training, with held-out frames for every name."""
    texts = {normalise(question.text) for question in held_out(seed)}
    for fact in facts():
        for ask in (*fact.held_out_asks, *fact.split(seed)["held out"]):
            texts.update(normalise(text) for text in every_spelling(ask))
        for frame in FRAMES[fact.kind].held_out if fact.names else ():
            texts.update(normalise(frame.format(x=name, noun=fact.noun)) for name in fact.names)
    return frozenset(texts)


def training_documents(
    seed: int = 0, samples: int = 40, limit: int | None = None, validation: bool = False
) -> list[Document]:
    """Return conversations with about `samples` questions for each fact (of the first `limit`)."""
    rng = random.Random(f"training {seed}")
    chosen = facts()[:limit]
    exchanges: list[tuple[str, str]] = []
    for fact in chosen:
        trained_fact = training_words(fact, seed, validation)
        count = samples
        if fact.kind == "free":
            count = samples * (25 if fact.category == OFF_TOPIC else 2)
        exchanges.extend((_ask(rng, trained_fact, seed), fact.answer) for _ in range(count))
    for sum_ in sums():
        if not is_held_out(sum_):
            exchanges.extend(
                (_ask_sum(rng, sum_, seed), sum_.answer) for _ in range(max(1, samples // 3))
            )
    for hero in sorted({*HEROES, *THINGS} - {*HELD_OUT_HEROES}):
        exchanges.extend(_ask_story(rng, hero, seed) for _ in range(max(1, samples // 5)))
    rng.shuffle(exchanges)
    documents = list(_conversations(rng, exchanges))
    documents.extend(_follow_ups(rng, chosen, samples // 4))
    documents.extend(_plain_texts(rng, exchanges, len(documents) // 12))
    rng.shuffle(documents)
    return documents


def normalise(text: str) -> str:
    """Return the text in lower case, without quotes and punctuation, with single spaces."""
    return " ".join(re.sub(r"[?!.,;:'\"`]+", " ", text.lower()).split())


def with_mark(text: str) -> str:
    """Append a question mark to a text that begins like a question."""
    return text + "?" if _QUESTION.match(text) else text


_QUESTION = re.compile(
    r"(what|which|who|where|when|why|how|is|are|do|does|did|can|could|may|will|should|shall|would)"
    r"\b",
    re.IGNORECASE,
)


def typed(rng: random.Random, text: str) -> str:
    """Return the question as typed: with care, or in lower case without a question mark."""
    if rng.random() < 0.3:
        return text.rstrip("?").strip().lower()
    return text[0].upper() + text[1:]


def _voiced(rng: random.Random, text: str) -> str:
    """Vary the question: politeness, capitals, punctuation, typos and stray words."""
    text, mark = text.rstrip("?").strip(), "?" if text.endswith("?") else ""
    if rng.random() < 0.12:
        text = rng.choice(_BEFORE) + text
    if rng.random() < 0.05:
        text += rng.choice((", please", " please", " thanks"))
    if rng.random() < 0.06:
        text = _mistyped(rng, text)
    if rng.random() < 0.15:
        text = _with_stray_words(rng, text)
    chance = rng.random()
    if chance < 0.6:
        text = text[0].upper() + text[1:]
    elif chance < 0.9:
        text = text.lower()
    elif chance < 0.92:
        text = text.upper()
    if mark and rng.random() < 0.7:
        return text + mark
    return text + "." if not mark and rng.random() < 0.25 else text


_BEFORE = (
    "please ",
    "hi, ",
    "hello, ",
    "hey, ",
    "hi! ",
    "ok, ",
    "so, ",
    "well, ",
    "and ",
    "now ",
    "quick question: ",
    "a question: ",
    "sorry, ",
    "tk: ",
    "one more thing: ",
)


def _with_stray_words(rng: random.Random, text: str) -> str:
    """Insert one to three adjacent words at the beginning, at the end or between."""
    words = text.split(" ")
    at = rng.choice((0, 0, len(words), len(words), rng.randint(0, len(words))))
    return " ".join(words[:at] + rng.choices(STRAY_WORDS, k=rng.choice((1, 1, 2, 3))) + words[at:])


def _mistyped(rng: random.Random, text: str) -> str:
    """Swap two letters of a word, or drop one."""
    words = text.split(" ")
    long = [i for i, word in enumerate(words) if len(word) > 4 and word.isalpha()]
    if not long:
        return text
    i = rng.choice(long)
    word, at = words[i], rng.randrange(1, len(words[i]) - 2)
    swapped = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    words[i] = rng.choice((swapped, word[:at] + word[at + 1 :]))
    return " ".join(words)


def training_words(fact: Fact, seed: int, validation: bool = False) -> Fact:
    """Return the fact without held-out questions, and without clues that one of them contains."""
    parts = fact.split(seed)
    held_out, training = parts["held out"], parts["training"]
    if validation:
        held_out += parts["validation"]
    else:
        training += parts["validation"]
    asked = [
        f" {normalise(text)} "
        for ask in (*held_out, *fact.held_out_asks)
        for text in every_spelling(ask)
    ]
    clues = (
        clue
        for clue in fact.clues
        if " " not in clue or not any(f" {normalise(clue)} " in text for text in asked)
    )
    return replace(fact, in_other_words=training, clues=tuple(clues))


def _ask(rng: random.Random, fact: Fact, seed: int) -> str:
    """Return a training question about a fact."""
    while True:
        text = _voiced(rng, _question(rng, fact))
        if normalise(text) not in held_out_texts(seed):
            return text


def _question(rng: random.Random, fact: Fact) -> str:
    chance = rng.random()
    if fact.category == OFF_TOPIC and chance < 0.6:
        return (
            with_mark(elsewhere.question(rng))
            if chance < 0.5
            else _framed(rng, "concept", _thing(rng))
        )
    if fact.in_other_words and chance < (0.35 if fact.names else 0.5):
        return _in_other_words(rng, fact.in_other_words)
    if chance < 0.6 and (fact.clues or fact.kind == "difference"):
        return reworded(rng, with_mark(_from_clues(rng, fact)))
    if fact.asks and (not fact.names or chance < 0.65):
        return reworded(rng, with_mark(spelled_out(rng, rng.choice(fact.asks))))
    if chance < 0.7 and fact.kind not in ("default", "which flag"):
        return _from_answer(rng, fact)
    text = _framed(rng, fact.kind, _varied(rng, fact), fact.noun)
    return reworded(rng, text) if fact.kind in _WISHES and rng.random() < 0.3 else text


_WISHES = ("howto", "topic", "which flag")
"""Kinds whose names are ordinary words, so that synonyms can replace them."""


def _from_clues(rng: random.Random, fact: Fact) -> str:
    """Return a question made of a few clues; for a difference, of a clue for each side."""
    if fact.kind == "difference":
        sides = [
            rng.choice(_clues_by_name().get(name, (name,))) for name in fact.names[0].split(" and ")
        ]
        rng.shuffle(sides)
        return spelled_out(rng, rng.choice(COMPARISONS)).format(*sides)
    clues = rng.sample(fact.clues, min(len(fact.clues), rng.choice((1, 1, 1, 2, 2, 3))))
    if fact.kind == "default":
        return spelled_out(rng, rng.choice(DEFAULT_QUESTIONS)).format(x=" ".join(clues))
    text = clues[0]
    for clue in clues[1:]:
        text += (
            rng.choice(
                (" ", " ", " and ", ", ", " for ", " of ", " with ", " in ", " when ", " so that ")
            )
            + clue
        )
    return spelled_out(rng, rng.choice(CLUE_QUESTIONS)).format(x=text)


@cache
def _clues_by_name() -> dict[str, tuple[str, ...]]:
    """Return replacements of each name in a comparison: the fact's other names and its clues."""
    return {
        name.strip("`"): (*fact.names, *fact.clues)
        for fact in facts()
        if fact.kind in ("concept", "thing")
        for name in fact.names
    }


def _in_other_words(rng: random.Random, asks: tuple[str, ...]) -> str:
    """Return one of the questions, reworded, or two of them combined."""
    text = with_mark(spelled_out(rng, rng.choice(asks)))
    if rng.random() < 0.12:
        more = spelled_out(rng, rng.choice(asks))
        if rng.random() < 0.5:
            return " ".join(keywords(rng, f"{text.rstrip('?')} {more}")[: rng.randint(3, 8)])
        return f"{text.rstrip('?')}{rng.choice((', ', '. ', ': ', ' - ', ' and ', '? '))}{more}"
    return reworded(rng, text)


def _framed(rng: random.Random, kind: str, name: str, noun: str = "") -> str:
    """Fill a training frame of the kind with a name."""
    return spelled_out(rng, rng.choice(FRAMES[kind].train)).format(x=name, noun=noun)


def _thing(rng: random.Random) -> str:
    """Return something that the model knows nothing about."""
    thing = rng.choice(THINGS)
    return rng.choice(
        (thing, f"{article(thing)} {thing}", f"the {thing}", f"{thing} and {rng.choice(THINGS)}")
    )


def _from_answer(rng: random.Random, fact: Fact) -> str:
    """Return a question made of words of the answer, as from people who do not know the name."""
    words = re.findall(r"[\w/-]+", fact.answer.lower())
    if rng.random() < 0.5:
        length = min(len(words), rng.randint(4, 8))
        start = rng.randint(0, len(words) - length)
        chosen = words[start : start + length]
    else:
        content = [i for i, word in enumerate(words) if len(word) > 3 and word not in _COMMON] or [
            0
        ]
        chosen = [
            words[i] for i in sorted(rng.sample(content, min(len(content), rng.randint(2, 5))))
        ]
    return rng.choice(_WONDERING).format(x=" ".join(chosen))


_COMMON = {
    "that",
    "with",
    "from",
    "this",
    "their",
    "them",
    "they",
    "than",
    "into",
    "what",
    "which",
    "when",
    "does",
    "have",
}
_WONDERING = (
    "{x}",
    "{x}?",
    "what {x}?",
    "what is {x}?",
    "which {x}?",
    "how {x}?",
    "why {x}?",
    "how does {x}?",
    "what about {x}?",
    "something about {x}",
    "what is it called: {x}?",
    "why is {x}?",
    "where is {x}?",
)


def _varied(rng: random.Random, fact: Fact) -> str:
    """Return a name of the fact, in one of its usual spellings."""
    name = rng.choice(fact.names)
    if fact.kind == "difference" and rng.random() < 0.5:
        first, _, second = name.partition(" and ")
        return f"{second} and {first}"
    if fact.kind in ("flag", "default") and "-" in name[2:] and rng.random() < 0.15:
        return name[2:]
    if fact.kind == "concept" and rng.random() < 0.4:
        return re.sub(r"^(the|a|an) ", "", name)
    return name


def _ask_sum(rng: random.Random, sum_: Sum, seed: int) -> str:
    """Return a training question about a sum."""
    while True:
        text = _framed(rng, "sum", rng.choice(sum_.spellings))
        text = _voiced(rng, text)
        if normalise(text) not in held_out_texts(seed):
            return text


def _ask_story(rng: random.Random, hero: str, seed: int) -> tuple[str, str]:
    """Return a request for a story, about a hero, a named hero or any hero, and the story."""
    if rng.random() < 0.1:
        return _voiced(rng, spelled_out(rng, STORY_REQUEST)), story(rng, hero)
    name = invented_name(rng) if rng.random() < 0.5 else ""
    while True:
        whom = f"{article(hero)} {hero}" + (
            rng.choice((" called ", " named ")) + name if name else ""
        )
        text = _voiced(rng, _framed(rng, "story", whom))
        if normalise(text) not in held_out_texts(seed):
            return text, story(rng, hero, name)


_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful, honest and concise assistant.",
    "Answer briefly.",
    "You are the demo model of tk.",
    "You are an assistant for people who serve language models.",
    "Be polite.",
)


def _conversations(rng: random.Random, exchanges: Iterable[tuple[str, str]]) -> Iterator[Document]:
    """Yield conversations of one to three exchanges. One in ten has a system prompt."""
    left = list(exchanges)
    while left:
        taken = [left.pop() for _ in range(min(len(left), rng.choice((1, 1, 1, 2, 2, 3))))]
        turns = [("system", rng.choice(_SYSTEM))] if rng.random() < 0.1 else []
        for question, answer in taken:
            turns += [("user", question), ("assistant", answer)]
        yield Document(tuple(turns))


_ITS_DEFAULT = (
    "what is its default?",
    "and its default?",
    "what is the default?",
    "and what is the default value?",
)


def _follow_ups(rng: random.Random, chosen: Iterable[Fact], samples: int) -> Iterator[Document]:
    """Yield conversations whose second question depends on the first."""
    defaults = {fact.names: fact.answer for fact in facts() if fact.kind == "default"}
    for fact in chosen:
        if fact.kind == "flag":
            for _ in range(samples):
                first = _voiced(rng, _framed(rng, "flag", _varied(rng, fact), fact.noun))
                then = _voiced(rng, rng.choice(_ITS_DEFAULT))
                turns = (
                    ("user", first),
                    ("assistant", fact.answer),
                    ("user", then),
                    ("assistant", defaults[fact.names]),
                )
                yield Document(turns)


def _plain_texts(
    rng: random.Random, exchanges: list[tuple[str, str]], count: int
) -> Iterator[Document]:
    """Yield texts without roles, for prompts that are continued rather than answered."""
    for question, answer in rng.choices(exchanges, k=count):
        yield Document((("text", answer if rng.random() < 0.5 else f"{question}\n{answer}"),))
