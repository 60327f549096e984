"""The demo model's corpus: conversations made of `facts` and `invent`, and a held-out part.

Everything follows from the seed. Held out are whole frames (see `frames`), of the questions that ask for a fact in
other words than its names a third, some sums and some heroes of stories; no held-out question occurs in the training
part, whatever its case and punctuation. To choose between recipes without looking at what is held out, train with
`validation`: some more questions in other words are left out then, which `validation_questions` lists.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from tools.demo import elsewhere
from tools.demo.facts import FACTS, Fact, every_spelling, facts, spelled_out
from tools.demo.frames import FRAMES, STRAY_WORDS, THINGS
from tools.demo.invent import (
    HELD_OUT_HEROES,
    HELD_OUT_NAMES,
    HEROES,
    Sum,
    article,
    invented_name,
    never_trained,
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
    """A held-out question, its answer (of a story: who it is about), and the chat before it.

    `how` says what is new to the model in it; `also_right` are other answers to it.
    """

    category: str
    how: str
    text: str
    answer: str
    before: tuple[tuple[str, str], ...] = ()
    also_right: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """One conversation, as (role, content) pairs; plain text has the role "text"."""

    turns: tuple[tuple[str, str], ...]


@cache
def held_out(seed: int = 0) -> tuple[Question, ...]:
    """The questions that the model never sees in training, as a person would type them."""
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
        if never_trained(sum_):
            text = _framed(rng, "sum", rng.choice(sum_.spellings))
            made.append(Question(NEW_SUMS, "new sum", typed(rng, text), sum_.answer))
    for sum_ in rng.sample([s for s in every if not never_trained(s)], 150):
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
    """What training with `validation` leaves out too."""
    rng = random.Random(f"validation {seed}")
    return [
        question
        for fact in facts()
        for question in _in_new_words(rng, fact, "other words", fact.split(seed)["validation"])
    ]


def _in_new_words(
    rng: random.Random, fact: Fact, how: str, asks: Iterable[str]
) -> Iterator[Question]:
    """Questions of a fact that do not come from frames."""
    category = OTHER_WORDS if fact.category == FACTS else fact.category
    also_right = tuple(answer for key in fact.also for answer in _answers()[key])
    for ask in asks:
        text = typed(rng, with_mark(spelled_out(rng, ask)))
        yield Question(category, how, text, fact.answer, also_right=also_right)


@cache
def _answers() -> dict[str, tuple[str, ...]]:
    """The answers of the facts by key; of a flag there are two."""
    answers: dict[str, tuple[str, ...]] = {}
    for fact in facts():
        answers[fact.key] = (*answers.get(fact.key, ()), fact.answer)
    return answers


@cache
def held_out_texts(seed: int = 0) -> frozenset[str]:
    """All that may not be trained on, normalised: `held_out`, and the held-out frames with every name."""
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
    """The training part: about `samples` questions for each fact (of the first `limit`), in conversations."""
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
        if not never_trained(sum_):
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
    """Lower case, without quotes and sentence marks, with single spaces."""
    return " ".join(re.sub(r"[?!.,;:'\"`]+", " ", text.lower()).split())


def with_mark(text: str) -> str:
    """The text with a question mark if it begins like a question."""
    return text + "?" if _QUESTION.match(text) else text


_QUESTION = re.compile(
    r"(what|which|who|where|when|why|how|is|are|do|does|did|can|could|may|will|should|shall|would)\b",
    re.IGNORECASE,
)


def typed(rng: random.Random, text: str) -> str:
    """The question as a careful person types it, or in a hurry: lower case and no mark."""
    if rng.random() < 0.3:
        return text.rstrip("?").strip().lower()
    return text[0].upper() + text[1:]


def _voiced(rng: random.Random, text: str) -> str:
    """The question as anybody types it: with or without manners, capitals, a mark, and typos."""
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
    """One to three words more, together: at the beginning, at the end or somewhere between."""
    words = text.split(" ")
    at = rng.choice((0, 0, len(words), len(words), rng.randint(0, len(words))))
    return " ".join(words[:at] + rng.choices(STRAY_WORDS, k=rng.choice((1, 1, 2, 3))) + words[at:])


def _mistyped(rng: random.Random, text: str) -> str:
    """Two letters of one word change places, or one is lost."""
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
    """The fact without the questions that are held out, and without the clues that stand in one word for word."""
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
    """A training question about a fact."""
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
        return _asked_in_other_words(rng, fact.in_other_words)
    if chance < 0.6 and (fact.clues or fact.kind == "difference"):
        return reworded(rng, with_mark(_made_of_clues(rng, fact)))
    if fact.asks and (not fact.names or chance < 0.65):
        return reworded(rng, with_mark(spelled_out(rng, rng.choice(fact.asks))))
    if chance < 0.7 and fact.kind not in ("default", "which flag"):
        return _made_of_the_answer(rng, fact)
    text = _framed(rng, fact.kind, _varied(rng, fact), fact.noun)
    return reworded(rng, text) if fact.kind in _WISHES and rng.random() < 0.3 else text


_WISHES = ("howto", "topic", "which flag")
"""Kinds whose names are ordinary words, which others can stand for."""


def _made_of_clues(rng: random.Random, fact: Fact) -> str:
    """A question of a few of the fact's clues; of a difference, of a clue for each side."""
    if fact.kind == "difference":
        sides = [
            rng.choice(_clues_by_name().get(name, (name,))) for name in fact.names[0].split(" and ")
        ]
        rng.shuffle(sides)
        return spelled_out(rng, rng.choice(_COMPARING)).format(*sides)
    clues = rng.sample(fact.clues, min(len(fact.clues), rng.choice((1, 1, 1, 2, 2, 3))))
    if fact.kind == "default":
        return spelled_out(rng, rng.choice(_ASKING_FOR_A_DEFAULT)).format(x=" ".join(clues))
    text = clues[0]
    for clue in clues[1:]:
        text += (
            rng.choice(
                (" ", " ", " and ", ", ", " for ", " of ", " with ", " in ", " when ", " so that ")
            )
            + clue
        )
    return spelled_out(rng, rng.choice(_ASKING_WITH_CLUES)).format(x=text)


@cache
def _clues_by_name() -> dict[str, tuple[str, ...]]:
    """What may stand for each name of a fact in a comparison: its other names and its clues."""
    return {
        name.strip("`"): (*fact.names, *fact.clues)
        for fact in facts()
        if fact.kind in ("concept", "thing")
        for name in fact.names
    }


_ASKING_WITH_CLUES = (
    "{x}",
    "{x}",
    "{how do I|how can I|can I|where do I|I want to|how would one} {| get| do| see| have} {x}",
    "{what is|what's|what about|what does it mean:|what do you call} {|the |a |this }{x}",
    "{why|when|where|which|who|how|what} {is|does|do|are|has|means|} {|the |it |my |there }{x}",
    "{is there|is it|are there|do I need|does it have|can it do|I need|I want} {|a |the |some }{x}",
    "{my|the|a|it|it is|this|we have|I have|I get|there is} {x}",
    "{my|the} {server|model|request|answer|user|program|machine} {x}",
    "{something|anything|question|problem|trouble|help} {with|about|on|for|concerning} {x}",
    "{the thing|the word|the part|what|the setting|the way} {for|of|with|that is|to} {x}",
    "{tell me about|explain|show me|say more on} {x}",
)
_ASKING_FOR_A_DEFAULT = (
    "{what is|which|how much|how many|how big is|what's} {|the }{normal|usual|standard|initial|preset} {|value for }{x}",
    "{x} {normally|out of the box|if I say nothing|when unset|if I change nothing|from the start|by itself}",
    "{what|which|how much|how many|where|how|is} {x} {is used|do I get|is it|applies} "
    "{normally|out of the box|if I say nothing|when unset}",
    "{do I have to set|must I give|what if I give no|what if I leave out|without|unchanged} {x}",
)
_COMPARING = (
    "{0} {or|versus|vs|compared with|and|against|rather than} {1}{|, which one|, what changes|, which is better}",
    "{which is|what is|when do I take|should I use|is it} {0} {or|and|versus} {1}",
    "{two kinds|two ways|which of the two}: {0}, {1}",
    "{is|are} {0} the same as {1}",
    "{why|how} is {0} {unlike|different from|not} {1}",
)


def _asked_in_other_words(rng: random.Random, asks: tuple[str, ...]) -> str:
    """One of the questions, put differently, or two of them in one."""
    text = with_mark(spelled_out(rng, rng.choice(asks)))
    if rng.random() < 0.12:
        more = spelled_out(rng, rng.choice(asks))
        if rng.random() < 0.5:
            return " ".join(keywords(rng, f"{text.rstrip('?')} {more}")[: rng.randint(3, 8)])
        return f"{text.rstrip('?')}{rng.choice((', ', '. ', ': ', ' - ', ' and ', '? '))}{more}"
    return reworded(rng, text)


def _framed(rng: random.Random, kind: str, name: str, noun: str = "") -> str:
    """A training frame of the kind around a name."""
    return spelled_out(rng, rng.choice(FRAMES[kind].train)).format(x=name, noun=noun)


def _thing(rng: random.Random) -> str:
    """Something that the model knows nothing about."""
    thing = rng.choice(THINGS)
    return rng.choice(
        (thing, f"{article(thing)} {thing}", f"the {thing}", f"{thing} and {rng.choice(THINGS)}")
    )


def _made_of_the_answer(rng: random.Random, fact: Fact) -> str:
    """A question made of words of the answer, for people who do not know the name of what they ask about."""
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
    """A name of the fact, in one of the ways people write it."""
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
    """A training question about a sum."""
    while True:
        text = _framed(rng, "sum", rng.choice(sum_.spellings))
        text = _voiced(rng, text)
        if normalise(text) not in held_out_texts(seed):
            return text


def _ask_story(rng: random.Random, hero: str, seed: int) -> tuple[str, str]:
    """A request for a story and a story: about a hero, about one with a name, or about anybody."""
    if rng.random() < 0.1:
        return _voiced(rng, spelled_out(rng, "{tell me|tell|write} a {|short }story")), story(
            rng, hero
        )
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
    """One to three exchanges each, one conversation in ten under a system prompt."""
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
    """Conversations whose second question only makes sense after the first."""
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
    """Texts without roles, for prompts that are continued rather than answered."""
    for question, answer in rng.choices(exchanges, k=count):
        yield Document((("text", answer if rng.random() < 0.5 else f"{question}\n{answer}"),))
