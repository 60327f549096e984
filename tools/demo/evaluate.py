"""Ask the demo model held-out questions: python -m tools.demo.evaluate [--model DIR] [--json]

Answers are generated greedily with Transformers. An answer is right if it equals the fact's answer
up to case and white space. For questions in other words, the answers of the facts in `also` are
right too. A story is right if it ends by itself, names its hero and uses only words of the corpus.
The exit code is 1 if less than 80 % of the questions about facts, in any phrasing, are answered
right."""

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
"""Required share of right answers to held-out questions about facts."""

ANY_PHRASING = "facts, phrased in any way"

MAX_TOKENS = 160


@dataclass(frozen=True, slots=True)
class Trial:
    """A question and the model's answer."""

    question: Question
    text: str
    ended: bool

    @property
    def is_right(self) -> bool:
        if self.question.category == STORIES:
            words, hero = normalise(self.text).split(), normalise(self.question.answer)
            is_readable = len(words) > 15 and (corpus_words() | {hero}).issuperset(words)
            return self.ended and is_readable and hero in words
        right = {
            " ".join(text.lower().split())
            for text in (self.question.answer, *self.question.also_right)
        }
        return self.ended and " ".join(self.text.lower().split()) in right


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo.evaluate", description="Measure the accuracy of tk's demo model."
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
        help="ask the validation questions instead, to choose between recipes",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the shares and all wrong answers as JSON"
    )
    args = parser.parse_args()
    trials = ask(args.model, validation_questions() if args.validation else held_out())
    shares = right_shares(trials)
    if args.json:
        wrong = [
            {
                "category": trial.question.category,
                "question": trial.question.text,
                "answer": trial.text,
                "right": trial.question.answer,
            }
            for trial in trials
            if not trial.is_right
        ]
        print(json.dumps({"shares": shares, "wrong": wrong}, indent=1))
    else:
        for name, (right, count) in shares.items():
            print(f"{name:55} {right:5} of {count:5}  {right / count:6.1%}")
    right, count = shares[ANY_PHRASING]
    return 0 if right >= REQUIRED * count else 1


def right_shares(trials: Sequence[Trial]) -> dict[str, tuple[int, int]]:
    """Count (right, asked) by category, by category and kind of novelty, and in total.

    Totals over facts in any phrasing, and over facts in other words, come first."""
    counts: dict[str, list[int]] = {}
    for trial in trials:
        question = trial.question
        names = [question.category, f"{question.category}: {question.how}", "all"]
        if question.category in (FACTS, OTHER_WORDS):
            names.append(ANY_PHRASING)
        for name in names:
            count = counts.setdefault(name, [0, 0])
            count[0] += trial.is_right
            count[1] += 1
    first = [name for name in (ANY_PHRASING, OTHER_WORDS) if name in counts]
    return {
        name: (counts[name][0], counts[name][1])
        for name in (*first, *sorted(counts.keys() - first))
    }


def ask(folder: Path, questions: Sequence[Question], batch_size: int = 128) -> list[Trial]:
    """Return the model's greedy answers, in the order of the questions."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    model = model.to(device).eval()
    prompts = [prompt(tokenizer, question) for question in questions]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    trials: dict[int, Trial] = {}
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
            trials[i] = Trial(questions[i], text, tokenizer.eos_token_id in row)
    return [trials[i] for i in range(len(questions))]


def prompt(tokenizer: Any, question: Question) -> str:
    """Format the question, and the chat before it, with the chat template."""
    messages = [
        {"role": role, "content": text}
        for role, text in (*question.before, ("user", question.text))
    ]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@cache
def corpus_words() -> frozenset[str]:
    """Return all words in the corpus's answers."""
    texts = (
        text
        for document in training_documents(samples=12)
        for role, text in document.turns
        if role == "assistant"
    )
    return frozenset(word for text in texts for word in normalise(text).split())


if __name__ == "__main__":
    sys.exit(main())
