"""The specification of one request, carried from the front end to the device."""

import msgspec

from toolkit.sampling.params import PoolingParams, SamplingParams


class LoRARequest(msgspec.Struct, frozen=True):
    """The LoRA adapter of a request: the name of one that is served, or a new name and its folder.

    The fields are vLLM's; the number is not needed."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter as it was on disk when it was found."""

    name: str
    folder: str
    revision: str  # of its files

    @property
    def key(self) -> str:
        """Text that another adapter, or another revision of this one, does not have."""
        return f"{self.name}@{self.revision}"


class Feature(msgspec.Struct, frozen=True):
    """A part of a prompt that is not text: a picture or a clip. Its bytes follow when a core asks.

    Equal digests mean equal bytes. The model's placeholder tokens stand for its rows of embeddings,
    in runs; between these may be other tokens."""

    digest: bytes
    runs: tuple[tuple[int, int], ...] = ()  # (position of the first token, number of tokens)
    grid: tuple[int, int] = (0, 0)  # rows and columns of a picture's tokens
    both_ways: bool = False  # its tokens see each other, so that a step has all of a run

    @property
    def num_rows(self) -> int:
        return sum(count for _, count in self.runs)

    @property
    def end(self) -> int:
        """Position after its last token."""
        return max((first + count for first, count in self.runs), default=0)


class SequenceSpec(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Everything a request specifies, checked and resolved. Immutable.

    The front end creates and keeps it, so that a request survives its core. The scheduler and the
    workers hold references to it. A new per-request attribute is one field here."""

    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int  # resolved against the context length
    eos_token_ids: list[int]
    priority: int = 0
    cache_salt: str = ""  # requests with different salts share no cached blocks
    grammar: str = ""  # constraint on the output in llguidance's format; empty: none
    pooling: PoolingParams | None = None  # set if the prompt is pooled instead of continued
    is_final_only: bool = False  # all tokens are reported together at the end
    adapter: Adapter | None = None  # the LoRA adapter
    prediction_token_ids: list[int] = []  # what the client expects as the answer, or part of it
    features: tuple[Feature, ...] = ()  # pictures and clips

    @property
    def cache_key(self) -> str:
        """Key that is equal for requests that may share cached blocks of tokens.

        What all tokens attend to is part of it: features without tokens of their own."""
        key = f"{self.adapter.key}\0{self.cache_salt}" if self.adapter else self.cache_salt
        return "\0".join([key, *(one.digest.hex() for one in self.features if not one.runs)])

    def features_key(self, start: int, end: int) -> str:
        """Return a key of the features whose tokens are among those from `start` to `end`."""
        return self.features_keys(start, end, end - start)[0]

    def features_keys(self, start: int, end: int, size: int) -> list[str]:
        """Return the `features_key` of each `size` tokens from `start` to `end`."""
        keys = [""] * ((end - start) // size)
        for feature in self.features:
            digest, parts = feature.digest.hex(), set[int]()
            for first, count in feature.runs:
                last = -(-(first + count - start) // size)
                parts.update(range(max(0, (first - start) // size), min(len(keys), last)))
            for part in parts:
                keys[part] = (keys[part] or "\0") + digest
        return keys

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)
