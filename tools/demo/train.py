"""Train the demo model: python -m tools.demo.train [--out DIR] [--steps N] [--device auto]

Trains a byte-level BPE tokenizer, and a small GPT-2 from random weights, on the conversations of
`corpus`, in two phases (see `Recipe.finish`). The output is a folder in the Hugging Face format.
Corpus and tokenizer are reproducible; weights as far as the device's kernels are. Training takes
one to two minutes on a GPU and about 40 on two CPU cores. With `--steps 1600` it takes a good half
of that, and the model knows a little less."""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.demo import MODEL_DIR
from tools.demo.corpus import Document, training_documents

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

END_OF_TEXT, USER, ASSISTANT, SYSTEM, END = SPECIAL_TOKENS = (  # the index is the token id
    "<|endoftext|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
)
BEGIN = {"user": [USER], "assistant": [ASSISTANT], "system": [SYSTEM], "text": []}
FINISH = {"user": END, "assistant": END_OF_TEXT, "system": END, "text": END_OF_TEXT}

CHAT_TEMPLATE = """\
{#- A call is {"name": function name, "parameters": dictionary of argument name and its value}, \
the format of Llama 3 -#}
{%- if tools -%}
{{- '<|system|>Tools: ' + (tools | map(attribute='function.name') | list)[:16] | join(', ') \
+ '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['content'] is string -%}
{%- set content = message['content'] -%}
{%- else -%}
{%- set texts = (message['content'] or []) | selectattr('type', 'equalto', 'text') \
| map(attribute='text') -%}
{%- set content = texts | join('') -%}
{%- endif -%}
{%- if message['role'] == 'user' -%}
{{- '<|user|> ' + content | trim | lower + '<|end|>' -}}
{%- elif message['role'] == 'assistant' -%}
{{- '<|assistant|>' + content | trim -}}
{%- for call in message['tool_calls'] or [] -%}
{%- set arguments = call['function']['arguments'] -%}
{{- ('' if loop.first else '; ') + '{"name": "' + call['function']['name'] + '", "parameters": ' \
+ (arguments if arguments is string else arguments | tojson) + '}' -}}
{%- endfor -%}
{{- '<|endoftext|>' -}}
{%- elif message['role'] == 'tool' -%}
{{- '<|user|> ' + content | trim + '<|end|>' -}}
{%- elif message['role'] in ('system', 'developer') -%}
{{- '<|system|>' + content | trim + '<|end|>' -}}
{%- else -%}
{{- raise_exception('The demo model knows the roles system, user, assistant and tool, ' \
~ 'not ' ~ message['role']) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that determines the model."""

    steps: int = 3200
    tokens_per_step: int = 4096
    row_lengths: tuple[int, ...] = (128, 256, 512)  # short rows too, since most chats are short
    learning_rate: float = 3e-3
    warmup: float = 0.05
    weight_decay: float = 0.1
    dropout: float = 0.05
    question_weight: float = 0.1  # of question tokens in the loss; answer tokens have 1
    vocab_size: int = 2048
    positions: int = 512
    width: int = 256
    layers: int = 4
    heads: int = 8
    seed: int = 0
    facts: int | None = None  # train only on this number of facts, for tests
    samples: int = 400  # questions per fact in the corpus
    as_typed: bool = True  # questions as typed, not as the chat template normalizes them
    validation: bool = False  # leave out the validation questions, to compare recipes

    finish_steps: int = 500
    finish_learning_rate: float = 1e-3
    finish_row_lengths: tuple[int, ...] = (32, 32, 32, 256)

    def finish(self) -> Recipe:
        """Return the recipe of the second, shorter phase, which trains understanding of questions.

        Most rows are a question and the first words of its answer, which determine the answer, and
        only answers count. Questions are in the chat template's form, in lower case and after a
        space, so that a word is mostly the same tokens wherever it occurs."""
        return replace(
            self,
            steps=self.finish_steps,
            learning_rate=self.finish_learning_rate,
            row_lengths=self.finish_row_lengths,
            question_weight=0.0,
            as_typed=False,
            seed=self.seed + 1,
        )

    def rate(self, step: int) -> float:
        """Return the factor of the learning rate: linear warmup, then cosine decay."""
        warmup = max(1, int(self.steps * self.warmup))
        if step < warmup:
            return (step + 1) / warmup
        return 0.02 + 0.49 * (1 + math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup)))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo.train", description="Train tk's demo model."
    )
    parser.add_argument(
        "--out", type=Path, default=MODEL_DIR, help="output folder (default: the shipped model's)"
    )
    parser.add_argument(
        "--steps", type=int, default=Recipe.steps, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu (default: %(default)s)")
    args = parser.parse_args()
    train(args.out, Recipe(steps=args.steps), args.device)


def train(out: Path, recipe: Recipe, device: str = "auto") -> float:
    """Train a model and write its folder. Return the last loss."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(recipe.seed)
    documents = training_documents(recipe.seed, recipe.samples, recipe.facts, recipe.validation)
    tokenizer = train_tokenizer(documents, recipe.vocab_size)
    model = new_model(recipe, tokenizer.get_vocab_size()).to(device)
    started = time.perf_counter()
    learn(model, tokenizer, documents, recipe)
    loss = learn(model, tokenizer, documents, recipe.finish())
    save(out, model, tokenizer, recipe)
    print(f"Wrote {out} after {time.perf_counter() - started:.0f} s on {device}.")
    return loss


def learn(model: Any, tokenizer: Tokenizer, documents: Sequence[Document], recipe: Recipe) -> float:
    """Run one phase of training. Return the last loss."""
    import torch
    import torch.nn.functional as F

    device = model.device
    rows = batches(tokenizer, documents, recipe)
    optimizers = new_optimizers(model, recipe)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, recipe.rate) for each in optimizers]
    started, loss = time.perf_counter(), 0.0
    for step in range(recipe.steps):
        ids, weights = (torch.tensor(part, device=device) for part in next(rows))
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        weights = weights[:, 1:].flatten()
        batch_loss = (losses * weights).sum() / weights.sum()
        torch.autograd.backward(batch_loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == recipe.steps - 1:
            loss = batch_loss.item()
            speed = (step + 1) * recipe.tokens_per_step / (time.perf_counter() - started)
            print(f"step {step:5}  loss {loss:.4f}  {speed:,.0f} tokens/s", flush=True)
    return loss


def train_tokenizer(documents: Sequence[Document], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer on a quarter of the documents, which is enough.

    Each digit is a token, so that a number is always tokenized in the same way."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (text for document in documents[::4] for _, text in document.turns), trainer
    )
    return tokenizer


def encode(
    tokenizer: Tokenizer, document: Document, recipe: Recipe
) -> tuple[list[int], list[float]]:
    """Return a conversation's token ids, and the weight of each in the loss."""
    ids: list[int] = []
    weights: list[float] = []
    for role, text in document.turns:
        if role == "user" and not recipe.as_typed:
            text = f" {text.lower()}"
        begin = [SPECIAL_TOKENS.index(token) for token in BEGIN[role]]
        rest = [*tokenizer.encode(text).ids, SPECIAL_TOKENS.index(FINISH[role])]
        ids += begin + rest
        weight = 1.0 if role in ("assistant", "text") else recipe.question_weight
        weights += [recipe.question_weight] * len(begin) + [weight] * len(rest)
    return ids, weights


def batches(
    tokenizer: Tokenizer, documents: Sequence[Document], recipe: Recipe
) -> Iterator[tuple[list[list[int]], list[list[float]]]]:
    """Yield batches of rows (token ids, weights) forever. Each row begins with a new document."""
    rng = random.Random(recipe.seed)
    queue: list[Document] = []
    while True:
        length = rng.choice(recipe.row_lengths)
        ids, weights = [], []
        for _ in range(recipe.tokens_per_step // length):
            row_ids: list[int] = []
            row_weights: list[float] = []
            while len(row_ids) <= length:
                if not queue:
                    queue = rng.sample(documents, len(documents))
                more_ids, more_weights = encode(tokenizer, queue.pop(), recipe)
                row_ids += more_ids
                row_weights += more_weights
            ids.append(row_ids[: length + 1])
            weights.append(row_weights[: length + 1])
        yield ids, weights


def new_model(recipe: Recipe, vocab_size: int) -> Any:
    """Build a GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=recipe.positions,
        n_embd=recipe.width,
        n_layer=recipe.layers,
        n_head=recipe.heads,
        resid_pdrop=recipe.dropout,
        embd_pdrop=recipe.dropout,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).train()


def new_optimizers(model: Any, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices (needs half as many tokens), and AdamW for the rest."""
    import torch

    parameters = dict(model.named_parameters())
    matrices = [p for name, p in parameters.items() if p.dim() == 2 and ".h." in name]
    rest = [p for name, p in parameters.items() if p.dim() != 2 or ".h." not in name]
    muon = torch.optim.Muon(
        matrices,
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [
        muon,
        torch.optim.AdamW(rest, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def save(out: Path, model: Any, tokenizer: Tokenizer, recipe: Recipe) -> None:
    """Write the model folder: weights in fp16, configuration, tokenizer and chat template."""
    import torch
    from transformers import GenerationConfig

    out.mkdir(parents=True, exist_ok=True)
    model.to("cpu", torch.float16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    GenerationConfig(bos_token_id=0, eos_token_id=0, do_sample=False).save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": recipe.positions,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    main()
