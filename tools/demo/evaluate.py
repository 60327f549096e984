"""Asks the demo model what it was not trained on: python -m tools.demo.evaluate [--model DIR] [--json]

Answers are generated greedily with Transformers. An answer is right when it is the fact's answer, whole and
word for word, up to case and white space; for questions in other words, also that of a fact which the data names
for it. A story is right when it ends by itself, names its hero and is made of words of the corpus. The exit code
is 1 when less than 80 % of the questions about facts, phrased in any way, are answered so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from toolkit.demo import MODEL_DIR
from tools.demo.corpus import (
    OTHER_WORDS,
    STORIES,
    Question,
    held_out,
    normalise,
    training_documents,
    validation_questions,
)
from tools.demo.facts import FACTS

REQUIRED = 0.8
"""The share of held-out questions about facts that has to be answered right."""

ANY_PHRASING = "facts, phrased in any way"

MAX_TOKENS = 160


@dataclass(frozen=True, slots=True)
class Answer:
    question: Question
    text: str
    ended: bool

    @property
    def right(self) -> bool:
        if self.question.category == STORIES:
            words, hero = normalise(self.text).split(), normalise(self.question.answer)
            readable = len(words) > 15 and (corpus_words() | {hero}).issuperset(words)
            return self.ended and readable and hero in words
        right = {
            " ".join(text.lower().split())
            for text in (self.question.answer, *self.question.also_right)
        }
        return self.ended and " ".join(self.text.lower().split()) in right


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo.evaluate", description="Measures tk's demo model."
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=MODEL_DIR,
        help="folder of the model (default: the shipped one)",
    )
    parser.add_argument(
        "--validation",
        action="store_true",
        help="ask what training with `validation` leaves out, to choose between recipes",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the shares, and every wrong answer, as JSON"
    )
    args = parser.parse_args()
    answers = ask(args.model, validation_questions() if args.validation else held_out())
    shares = right_shares(answers)
    if args.json:
        wrong = [
            {
                "category": a.question.category,
                "question": a.question.text,
                "answer": a.text,
                "right": a.question.answer,
            }
            for a in answers
            if not a.right
        ]
        print(json.dumps({"shares": shares, "wrong": wrong}, indent=1))
    else:
        for name, (right, count) in shares.items():
            print(f"{name:55} {right:5} of {count:5}  {right / count:6.1%}")
    right, count = shares[ANY_PHRASING]
    return 0 if right >= REQUIRED * count else 1


def right_shares(answers: Sequence[Answer]) -> dict[str, tuple[int, int]]:
    """(right, asked) by category, by category and what is new in the question, and over all.

    First come all questions about facts, and of these the ones in other words.
    """
    counts: dict[str, list[int]] = {}
    for answer in answers:
        question = answer.question
        names = [question.category, f"{question.category}: {question.how}", "all"]
        if question.category in (FACTS, OTHER_WORDS):
            names.append(ANY_PHRASING)
        for name in names:
            count = counts.setdefault(name, [0, 0])
            count[0] += answer.right
            count[1] += 1
    first = [name for name in (ANY_PHRASING, OTHER_WORDS) if name in counts]
    return {
        name: (counts[name][0], counts[name][1])
        for name in (*first, *sorted(counts.keys() - first))
    }


def ask(folder: Path, questions: Sequence[Question], batch_size: int = 128) -> list[Answer]:
    """The model's greedy answers, in the order of the questions."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    model = model.to(device).eval()
    prompts = [prompt(tokenizer, question) for question in questions]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: dict[int, Answer] = {}
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        inputs = tokenizer([prompts[i] for i in chosen], return_tensors="pt", padding=True).to(
            device
        )
        with torch.inference_mode():
            rows = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        for i, row in zip(chosen, rows[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            text = tokenizer.decode(row, skip_special_tokens=True)
            answers[i] = Answer(questions[i], text, tokenizer.eos_token_id in row)
    return [answers[i] for i in range(len(questions))]


def prompt(tokenizer: Any, question: Question) -> str:
    """The question, and the chat before it, as the chat template writes them."""
    messages = [
        {"role": role, "content": text}
        for role, text in (*question.before, ("user", question.text))
    ]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@cache
def corpus_words() -> frozenset[str]:
    """Every word that the corpus answers with."""
    texts = (
        text
        for document in training_documents(samples=12)
        for role, text in document.turns
        if role == "assistant"
    )
    return frozenset(word for text in texts for word in normalise(text).split())


if __name__ == "__main__":
    sys.exit(main())
