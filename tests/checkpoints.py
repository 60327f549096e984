"""Small random checkpoints in Transformers' format, and Transformers' outputs for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Union

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests import engines
from tests.models.architectures import ARCHITECTURES
from tests.references import Reference
from toolkit import LLM, RequestOutput
from toolkit.sampling.params import SamplingParams
from toolkit.sequence import SequenceSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCAB = 262
"""The bytes, <|endoftext|> <|user|> <|assistant|> <|end|>, and two that only the model has."""
EOS = 256
NEW_TOKENS = 64  # per answer in the parity tests

_CONFIGS = {
    "Gemma3": "Gemma3TextConfig",
    "Gemma3Seeing": "Gemma3Config",
    "Gemma4": "Gemma4TextConfig",
    "Llama4": "Llama4TextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Seeing": "Qwen3_5Config",
    "Qwen3_5MoeSeeing": "Qwen3_5MoeConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
}
_SEEING = (
    "Qwen2VL",
    "Qwen2_5_VL",
    "Qwen3VL",
    "Qwen3VLMoe",
    "Qwen3_5Seeing",
    "Qwen3_5MoeSeeing",
    "Qwen3ASR",
    "Gemma3Seeing",
    "Mistral3",
    "Llava",
    "Idefics3",
    "SmolVLM",
    "InternVL",
)  # with a tower
_HEADS = {"GPT2": "GPT2LMHeadModel", "Whisper": "WhisperForConditionalGeneration"} | {
    family: f"{family.removesuffix('Seeing')}ForConditionalGeneration" for family in _SEEING
}
_VECTORS = ("sinks", "class_embedding", "lambda_1", "lambda_2", "A_log")
_SCALES = ("scale", "per_expert_scale", "layer_scalar")
_OFFSET_NORMS = ("Gemma", "Nemotron", "Qwen3Next", "Qwen3_5")  # their norms multiply by 1 + weight
_TOKENIZER = Path(__file__).parent / "references" / "tokenizer"

Model = Union[Reference, "torch.nn.Module"]


def make_model(family: str, settings: dict, seed: int = 0) -> Reference:
    """Return Transformers' model of a class, with random weights. It is made when it is used."""
    return Reference(family, settings, seed)


def make_reference(name: str, seed: int = 0) -> Reference:
    """Return the model of a row of ARCHITECTURES."""
    return make_model(*ARCHITECTURES[name], seed)


def head_name(family: str) -> str:
    """Return the name of Transformers' class."""
    return _HEADS.get(family, f"{family}ForCausalLM")


def random_model(family: str, settings: dict) -> torch.nn.Module:
    """Make a model whose parameters are all random, so that each shows in the output.

    Transformers initializes norms and biases to values that do nothing.
    """
    import transformers

    config_class = getattr(transformers, _CONFIGS.get(family, f"{family}Config"))
    ids = {"vocab_size": VOCAB, "bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": None}
    if family in _SEEING:
        ids = {"text_config": ids | settings["text_config"]}
        settings = {name: value for name, value in settings.items() if name != "text_config"}
    torch.manual_seed(0)
    head = getattr(transformers, head_name(family))
    # Some versions choose SDPA for Gemma 2, which ignores its soft cap.
    config = config_class(**ids | settings, attn_implementation="eager")
    model = head(config).eval()
    has_offset = family.startswith(_OFFSET_NORMS) and family != "Gemma4"
    norm_mean = 0.0 if has_offset else 1.0
    with torch.no_grad():
        for module in model.modules():
            is_norm = "Norm" in type(module).__name__
            for name, parameter in module.named_parameters(recurse=False):
                is_vector = name.endswith("bias") or name in _VECTORS
                if name in _SCALES:
                    parameter.normal_(1.0, 0.3)
                elif is_vector or is_norm:
                    mean = 1.0 if type(module).__name__.endswith("Gated") else norm_mean
                    parameter.normal_(mean if name == "weight" else 0.0, 0.3)
                elif isinstance(module, torch.nn.Embedding):
                    parameter.normal_(0.0, parameter.shape[1] ** -0.5)
                elif parameter is not model.get_input_embeddings().weight:  # not a tied head
                    fan_in = parameter.shape[0 if type(module).__name__ == "Conv1D" else 1]
                    if type(module).__name__ in ("Conv1d", "Conv2d"):
                        fan_in = parameter[0].numel()
                    parameter.normal_(0.0, 2 * fan_in**-0.5)
            for name, buffer in module.named_buffers(recurse=False):
                if "correction_bias" in name or name in _SCALES:
                    buffer.normal_(float(name in _SCALES), 0.3)
    return model


def save(model: Model, folder: Path, *, tokenizer: bool = True, **options: object) -> Path:
    """Save the checkpoint, with a byte tokenizer and a chat template.

    Transformers saves it with options, such as the size of shards, and if a test has used it."""
    if isinstance(model, Reference) and not options and not model.is_used:
        model.save(folder)
    else:
        model.save_pretrained(folder, **options)
    if tokenizer:
        for path in _TOKENIZER.iterdir():
            shutil.copy(path, folder)
    return folder


def save_config(family: str, settings: dict, folder: Path) -> None:
    """Write the config of a model without weights, as for `load_format="dummy"`."""
    import transformers

    config_class = getattr(transformers, _CONFIGS.get(family, f"{family}Config"))
    config_class(**settings, architectures=[head_name(family)]).save_pretrained(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level BPE without merges: one token per byte."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|end|>"],
    )
    tokenizer.chat_template = (
        "{% for m in messages %}"
        "{% if m['role'] not in ['system', 'user', 'assistant'] %}"
        "{{ raise_exception('no such role') }}{% endif %}"
        "{{ '<|' + ('assistant' if m['role'] == 'assistant' else 'user') + '|>' }}"
        "{{ m['content'] + '<|end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    return tokenizer


def edit_json(path: Path, **changes: object) -> None:
    """Change keys of a JSON file; None removes a key."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    """Generate `count` greedy tokens with Transformers: batch size 1, with cache, no end token."""
    return greedy_batch(model, [prompt], count)[0]


def greedy_batch(model: Model, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Generate `count` greedy tokens for each of some prompts of equal length, as `greedy`."""
    if isinstance(model, Reference):
        return [model.greedy(prompt, count) for prompt in prompts]
    ids = torch.tensor(prompts)
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=VOCAB + 1,
            pad_token_id=0,
        )
    return out[:, ids.shape[1] :].tolist()


def logits(model: Model, tokens: list[int]) -> torch.Tensor:
    """Return [len(tokens), vocab] from one uncached Transformers forward."""
    if isinstance(model, Reference):
        return model.logits(tokens)
    with torch.no_grad():
        return model(torch.tensor([tokens], device=model.device)).logits[0].cpu()


def spec_of(
    params: SamplingParams, num_prompt_tokens: int = 0, eos_token_ids: Sequence[int] = ()
) -> SequenceSpec:
    return SequenceSpec(
        prompt_token_ids=[0] * num_prompt_tokens,
        params=params,
        max_tokens=1,
        eos_token_ids=list(eos_token_ids),
    )


def generate(llm: LLM, prompts: list[list[int]], **params: object) -> list[RequestOutput]:
    """Complete prompts together, greedily, with NEW_TOKENS tokens each, unless `params` differ."""
    usual = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    settings = SamplingParams(**usual | params)
    return llm.generate([{"prompt_token_ids": p} for p in prompts], settings, use_tqdm=False)


def engine_logits(llm: LLM, prompt: list[int]) -> torch.Tensor:
    """Return [len(prompt), vocab] as the engine computes them, in its type."""
    model = engines.model(llm)
    seen: list[torch.Tensor] = []
    compute = model.logits
    model.logits = lambda hidden, *rest: seen.append(compute(hidden, *rest)) or seen[-1]
    try:
        generate(llm, [prompt], max_tokens=1, prompt_logprobs=0)
    finally:
        del model.logits
    sampled, *of_prompt = seen
    return torch.cat((*of_prompt, sampled))


def records_steps(llm: LLM) -> bool:
    """Run a decode step on a CPU. Return True if it was recorded, to be replayed."""
    generate(llm, [[1]], max_tokens=2)
    if engines.replay(llm) is None:
        return False
    recorded = engines.recorded_steps(llm)
    return bool(recorded) and all(recorded.values())
