"""Names in checkpoints of models that also see: tk reads their text decoders alone."""

import re

TOWERS = (
    *("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "connector."),
    *("embed_vision.", "audio_tower.", "embed_audio."),
)
"""Parts of names of a tower's tensors."""
_TOWER = re.compile(rf"(?:model\.)?(?:{'|'.join(map(re.escape, TOWERS))})")
_LLAVA_TOWER = re.compile(
    r"(?:model\.)?(?:(vision_tower\.)(?:vision_model\.)?"
    r"|(multi_modal_projector\.|vision_model\.|connector\.))"
)
_THINKER = "thinker."  # of Qwen3-ASR's own checkpoints
_PROJECTIONS = {
    "audio_tower.proj1.": "multi_modal_projector.linear_1.",
    "audio_tower.proj2.": "multi_modal_projector.linear_2.",
}
_NESTED = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")
_DOT = r"\\?\.(?![*+?{])"  # of a regular expression, that stands for one character
_NESTED_EXPRESSION = re.compile(
    rf"(?:model(?:{_DOT}|\.\*))?(?:language_model|text_model)"
    rf"(?:(?P<dot>{_DOT})(?:model{_DOT})?)?(?P<head>lm_head)?"
)


def text_name(name: str) -> str:
    """Return the name of a tensor or module in a checkpoint of the decoder alone.

    Those of LLaVA's tower, and of others like it, lose parts that only some checkpoints have."""
    if name.startswith(_THINKER):
        name = name.removeprefix(_THINKER)
        part = next((one for one in _PROJECTIONS if name.startswith(one)), None)
        if part is not None:
            return _PROJECTIONS[part] + name.removeprefix(part)
        return f"model.{name}" if is_of_tower(name) else name
    if (prefix := _NESTED.match(name)) is None:
        found = _LLAVA_TOWER.match(name)
        return name if found is None else (found[1] or found[2]) + name[found.end() :]
    rest = name[prefix.end() :]
    return rest if rest.startswith("lm_head") else f"model.{rest}"


def text_pattern(pattern: str) -> str:
    """Return a name, or a regular expression, so that it matches the decoder's names."""
    is_name = re.fullmatch(r"[\w.]+", pattern) is not None
    return text_name(pattern) if is_name else _NESTED_EXPRESSION.sub(_of_text, pattern)


def _of_text(found: re.Match[str]) -> str:
    return found["head"] or ("model\\." if found["dot"] else "model")


def is_of_tower(name: str) -> bool:
    """Return True for a tensor or module of a tower for pictures."""
    return _TOWER.match(name) is not None
