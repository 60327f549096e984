"""Fields of config.json that tk does not read. Imports no torch.

A field that could change what the model computes is refused: a model with a feature that tk lacks
would give wrong answers without an error."""

import json
import re
from typing import Any, ClassVar, Protocol

_HARMLESS = re.compile(
    r"""
    # Training and initialization
    \w*dropout\w* | \w*_pdrop | layerdrop | initializer_\w+ | init_std | \w*_init\w* | \w*loss\w*
    | mask_(time|feature)_\w+ | apply_spec_augment
    | gradient_checkpointing | label_smoothing | pretraining_tp | recompute\w*
    # Tokens and tokenizers
    | \w+_token | \w+_tokens? | \w+_ids? | \w+_token_index | tokenizer\w* | prefix
    # Generation
    | do_sample | temperature | top_[kph] | typical_p | min_p | early_stopping
    | (repetition|length|diversity)_penalty | num_beams | num_beam_groups | num_return_sequences
    | \w*no_repeat_ngram_size
    | (min|max)_(new_tokens|length) | exponential_decay_length_penalty | remove_invalid_values
    | task_specific_params
    # What is returned, and how it is computed
    | output_\w+ | return_dict\w* | use_cache | cache_implementation | keys_to_ignore\w*
    | attn_implementation | (use_)?(flash|fused?)_\w+ | flash_attn | use_bfloat16 | fp32_\w+
    | \w*softmax_in_fp32 | reorder_and_upcast_attn | chunk_size_feed_forward | torchscript
    | tf_legacy_loss | (tensor|sequence|pipeline)_parallel\w*
    # Lengths that are not the model's own, and layers with windows, if there are any
    | max_window_layers | n_ctx | seq_length | model_max_length | max_seq(uence)?_len(gth)?
    # Sizes that the weights' shapes repeat
    | kv_channels | attention_head_dim | org_vocab_size
    # Heads for classification, and poolers
    | num_labels | id2label | label2id | problem_type | finetuning_task | classifier\w*
    | summary_\w+ | pooler_\w+ | is_matryoshka | matryoshka_dimensions | sentence_transformers
    | sbert_\w+ | is_decoder
    # Names and versions
    | _\w+ | name_or_path | model_name | \w*version | auto_map | custom_pipelines | license
    | architectures | torch_dtype | transformers\.js_config | unsloth_\w+ | is_llama_config
    """,
    re.VERBOSE,
)


class Fixes(Protocol):
    """A config of a model or a tower."""

    fixed: ClassVar[dict[str, tuple[object, ...]]]
    __struct_fields__: ClassVar[tuple[str, ...]]


_OFF: tuple[object, ...] = (False, 0, "", [], {})


def find_unknown(raw: dict[str, Any], config: type[Fixes]) -> str | None:
    """Return why a field of a config.json is refused, or None.

    Fields that `config` lacks are accepted if their value is null, false, 0 or empty, if the model
    computes what they say (`config.fixed`), and if they never change a result."""
    skipped = {*config.__struct_fields__, "quantization_config"}
    if raw.get("use_sliding_window") is False:
        skipped.add("sliding_window")
    for name, value in raw.items():
        if name in skipped or _HARMLESS.fullmatch(name):
            continue
        if value is not None and value not in config.fixed.get(name, _OFF):
            shown = json.dumps(value)
            shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
            null = json.dumps({name: None})
            return (
                f"it has {name}: {shown}, which tk does not know for {raw.get('model_type')}. If "
                f"it does not change what the model computes, pass --hf-overrides '{null}'"
            )
    return None
