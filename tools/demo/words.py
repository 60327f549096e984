"""Synonyms, and rewording of questions without changing their meaning."""

from __future__ import annotations

import random
import re

_GROUPS = """
reply | answer | response | output
replies | answers | responses | outputs
fast | quick | speedy
faster | quicker
slow | sluggish | laggy
speed | pace
GPU | graphics card | video card | card
GPUs | graphics cards | cards
CPU | processor
VRAM | GPU memory | video memory | graphics memory
RAM | host memory | main memory
model | LLM | network | language model | AI
models | LLMs | networks | language models
server | service | instance
request | call | query
requests | calls | queries
input | prompt
inputs | prompts
user | client | customer
users | clients | people | customers
simultaneously | at once | at the same time | in parallel | concurrently
simultaneous | parallel | concurrent
flag | option | switch | setting | parameter | argument
limit | cap | restrict
maximum | max | largest | biggest
change | set | adjust | modify | configure
start | launch | boot | run
quit | stop | exit | end | kill
show | display | print
look at | see | view | check
machine | computer | box | PC
normally | by default | out of the box | usually | if I change nothing | if I say nothing
wait | delay
huge | long | big | large
small | tiny | little
folder | directory
download | fetch | pull
weights | weight files | checkpoint
terminal | console | shell | command line
program | script | app | application
generate | produce | write | create
page | block
pages | blocks
error | problem | failure
queue | line
password | key | secret
metric | measurement | statistic
metrics | measurements | statistics
graph | plot | chart | dashboard
monitoring | observability
choose | pick | select
make | let
begin | start
begins | starts
finish | end | complete
several | many | multiple | a few
keep | store | save
split | divide | cut
share | reuse
random | not deterministic
same | identical
number of | count of
file | document
iteration | step
route | endpoint | path | URL
text | words
word | token
forbid | ban | block
allow | permit
evicted | kicked out | pushed out | preempted
normalisation | norm | normalization
precision | number format | float type
how do I | how can I | how to | how could I | what do I do to
how does | how do you make
what is | what's
is there | do you have | does tk have | have you got
I want to | I need to | I'd like to | I have to | I would like to | let me
I want | I need | I'd like | give me
do not | don't
does not | doesn't
is not | isn't
cannot | can't | can not
it is | it's
my | the | our
it | tk
"""

_SAME: dict[str, tuple[str, ...]] = {}
for _line in _GROUPS.strip().splitlines():
    _group = tuple(_line.split(" | "))
    for _word in _group:
        _SAME.setdefault(_word.lower(), _group)
_ANY = re.compile(
    r"(?<![\w-])("
    + "|".join(re.escape(word) for word in sorted(_SAME, key=len, reverse=True))
    + r")(?![\w-])",
    re.IGNORECASE,
)

_FILLING_WORDS = """
a an the i it its is are am was were be been do does did doing to of in on at for with by from as
and or but so if then that this these those my your our me you we they them their there here what
which who how why when where can could will would shall should may might must have has had get got
just some any please not no than too very
"""
_FILLING = frozenset(_FILLING_WORDS.split())

_BEFORE = """
help, |help: |I wonder |any idea: |please tell me: |can somebody tell me |tell me, |
does anybody know |beginner here: |quick one: |sorry if this is obvious: |I have been wondering, |
my colleague asks: |for a friend: |hi all, |hey, |with tk, |in tk, |in tk: |about serving: |
my boss asks: |just curious: |next question: |hm, |okay but |and
""".replace("\n", "").split("|")
_AFTER = """
, any idea|, any ideas|, what now|, what can I do|, what is that|, what is that called|
, is that possible|, how|, why| in tk| with tk| here| in this tool|, I am new to this|, thank you|
, please help|, what do you recommend|, how come
""".replace("\n", "").split("|")


def reworded(rng: random.Random, text: str) -> str:
    """Replace some words by synonyms, drop words, or add a few around the question."""
    mark = "?" if text.endswith("?") else ""
    text = text.rstrip("?")
    if rng.random() < 0.6:
        text = _ANY.sub(lambda word: _other(rng, word[0]), text)
    chance = rng.random()
    if chance < 0.15:
        return " ".join(keywords(rng, text))
    if chance < 0.25:
        words = text.split()
        if len(words) > 4:
            del words[rng.randrange(len(words))]
        text = " ".join(words)
    if rng.random() < 0.15:
        text = rng.choice(_BEFORE).rstrip() + " " + text
    if rng.random() < 0.12:
        text += rng.choice(_AFTER)
        mark = "?" if rng.random() < 0.5 else mark
    return text + mark


def keywords(rng: random.Random, text: str) -> list[str]:
    """Return the words that carry the meaning, sometimes reordered, as typed into a search box."""
    found = re.findall(r"[\w./:+'-]+", text)
    chosen = [word for word in found if word.lower() not in _FILLING] or found
    if len(chosen) > 3 and rng.random() < 0.4:
        del chosen[rng.randrange(len(chosen))]
    if rng.random() < 0.4:
        rng.shuffle(chosen)
    return chosen


def _other(rng: random.Random, word: str) -> str:
    return rng.choice(_SAME[word.lower()]) if rng.random() < 0.35 else word
