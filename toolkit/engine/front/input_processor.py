"""Turn prompts and parameters into requests: tokenize, check, resolve defaults."""

import sys
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import msgspec

from toolkit.config.engine import OUTPUT_LIMIT, ModelConfig
from toolkit.engine.front.clips import (
    feature_of,
    no_sound_error,
    place_clips,
    read_clips,
    source_of,
    transcript_marker,
)
from toolkit.engine.front.feature_places import (
    count_places,
    frame_pictures,
    join_parts,
    placeholder,
)
from toolkit.engine.front.features import FeatureSource
from toolkit.engine.front.pictures import Picture, Pictures
from toolkit.engine.messages import EngineRequest
from toolkit.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    InvalidParamError,
    InvalidRequestError,
    ToolkitError,
)
from toolkit.files import parse_json
from toolkit.gguf.file import read_gguf
from toolkit.gguf.folder import is_gguf, read_file
from toolkit.gguf.names import quantization_of
from toolkit.sampling.logits_processors import check_arguments
from toolkit.sampling.params import SamplingParams, default_sampling
from toolkit.sequence import Adapter, Feature, SequenceSpec
from toolkit.speech.clip import Clip
from toolkit.text.tokenizer import Tokenizer, eos_token_ids
from toolkit.worker import WorkerInfo

MIN_TOO_LONG = 2**18  # characters that are tokenized, however small the context is

Prompt = str | list[int] | Mapping[str, object]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}. Mappings may have pictures:
{"multi_modal_data": {"image": one or a list}}, or the clip of a model that hears:
{"multi_modal_data": {"audio": (samples, rate)}}."""


class TokensPrompt(TypedDict):
    """A prompt of tokens, and its pictures."""

    prompt_token_ids: list[int]
    multi_modal_data: NotRequired[dict[str, Any]]


class Prepared(NamedTuple):
    """A checked request."""

    text: str | None  # of the prompt, if it is text
    request: EngineRequest
    features: Mapping[bytes, FeatureSource]  # by digest


class InputProcessor:
    """Tokenizes and checks requests. The engine core accepts every request that passes."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer | None,
        info: WorkerInfo,
        model: ModelConfig,
        pictures: Pictures | None = None,
    ) -> None:
        """pictures: None if prompts are text.

        Raises CheckpointError, and PluginError for a logits processor that is broken here."""
        self.tokenizer = tokenizer
        self.info, self.pictures = info, pictures
        self.default_sampling = load_default_sampling(folder, model)
        self._max_output = load_output_limit(folder, model)
        self._max_logprobs = model.max_logprobs
        self.model_type = load_model_type(folder)
        self.gguf_type = load_gguf_type(folder)
        self._processors = {plugin: plugin.load() for plugin in info.logits_processors}
        self._eos = [id for id in eos_token_ids(folder, tokenizer) if id < info.vocab_size]
        self.transcript_marker = transcript_marker(info, tokenizer)

    @property
    def transcribes(self) -> bool:
        """True if the model writes down what is said in a clip."""
        return self.info.hearing is not None or self.transcript_marker is not None

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        is_streamed: bool = True,
        adapter: Adapter | None = None,
        pictures: Sequence[Picture] = (),
    ) -> Prepared:
        """Return the request of a prompt, and what its pictures are loaded from.

        Unless it is streamed, the core may report all tokens at the end. Raises
        InvalidRequestError, for example for an empty prompt or a token outside the vocabulary."""
        self.require_generation()
        clips = read_clips(self.info, prompt)
        text, token_ids = self._tokenize(prompt, has_pictures=bool(pictures))
        sources: dict[bytes, FeatureSource] = {one.digest: one.source for one in pictures}
        sources |= {clip.digest: source_of(clip) for clip in clips}
        features = tuple(feature_of(clip) for clip in clips)
        if pictures or (clips and self.info.sound is not None):
            if params.truncate_prompt_tokens is not None:
                what = "picture" if pictures else "clip"
                raise InvalidParamError(
                    "truncate_prompt_tokens", f"could cut a {what}. Leave it out."
                )
            token_ids, features = self._expand(token_ids, pictures, clips)
        if not token_ids:
            raise InvalidRequestError("The prompt is empty.", param="prompt")
        max_prompt_tokens = self._max_prompt_tokens(params)
        if len(token_ids) > max_prompt_tokens:
            text, token_ids = None, token_ids[-max_prompt_tokens:]
        wrong = next(
            (t for t in (min(token_ids), max(token_ids)) if not 0 <= t < self.info.vocab_size), None
        )
        if wrong is not None:
            raise InvalidRequestError(
                f"The prompt contains token {wrong}. Valid tokens are 0 to "
                f"{self.info.vocab_size - 1}.",
                param="prompt",
            )
        if params.stop:
            self.require_tokenizer()
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self._max_logprobs:
                raise InvalidParamError(
                    name,
                    f"must be at most {self._max_logprobs} (--max-logprobs); got "
                    f"{getattr(params, name)}.",
                )
        params = self.tokenize_bad_words(params)
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            self._check_tokens(name, getattr(params, name) or ())
        for sequence in params.bad_words_token_ids or ():
            self._check_tokens("bad_words_token_ids", sequence)
        self._check_token_remains(params)
        self._check_timestamps(token_ids, params)
        prediction = self._tokenize_prediction(params.prediction)
        params = msgspec.structs.replace(params, prediction=None) if params.prediction else params
        check_arguments(self._processors, params.extra_args, self.info.vocab_size)
        spec = SequenceSpec(
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=self._resolve_max_tokens(len(token_ids), params),
            eos_token_ids=self._eos,
            priority=priority,
            grammar=self._resolve_grammar(params),
            adapter=adapter,
            prediction_token_ids=prediction,
            features=features,
            # Stop strings are matched in the front end, and log-probabilities arrive per token.
            is_final_only=not (is_streamed or params.stop_strings or params.logprobs is not None),
        )
        request = EngineRequest(id=request_id or uuid.uuid4().hex, spec=spec)
        return Prepared(text, request, sources)

    def _expand(
        self, token_ids: list[int], pictures: Sequence[Picture], clips: Sequence[Clip]
    ) -> tuple[list[int], tuple[Feature, ...]]:
        """Return a prompt with all tokens of its pictures or clips, and its features."""
        if clips:
            return self.place_clips(token_ids, clips)
        assert self.pictures is not None, "there are pictures"
        return self.pictures.expand(token_ids, pictures)

    def place_clips(
        self, token_ids: list[int], clips: Sequence[Clip]
    ) -> tuple[list[int], tuple[Feature, ...]]:
        """Return a prompt with all tokens of its clips, and its features: see `place_clips`."""
        assert self.info.sound is not None, "tokens stand for clips"
        return place_clips(self.info.sound, token_ids, clips)

    def _tokenize_prediction(self, prediction: str | None) -> list[int]:
        """Return a prediction's tokens, if a drafter reads them."""
        if not prediction or not self.info.reads_predictions:
            return []
        self.check_length(prediction)
        tokens = self.require_tokenizer().encode(prediction, add_special_tokens=False)
        return tokens[: self.info.max_model_len]

    def _resolve_grammar(self, params: SamplingParams) -> str:
        """Return the answer's grammar; empty without a constraint. Raises InvalidRequestError."""
        if params.structured_outputs is None:
            return ""
        self.require_tokenizer()
        if not self._eos:
            raise InvalidRequestError(
                "structured_outputs requires an end-of-sequence token, and this model has none.",
                param="structured_outputs",
            )
        return params.structured_outputs.to_grammar()

    def check_length(self, text: str) -> None:
        """Reject extremely long text before tokenizing it. Raises InvalidRequestError."""
        if len(text) > max(64 * self.info.max_model_len, MIN_TOO_LONG):
            raise ContextLengthError(self.info.max_model_len, "prompt", len(text), "characters")

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end an answer."""
        return self._eos

    def tokenize_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Return parameters with bad words as tokens, to be shared by several prompts."""
        if not params.bad_words:
            return params
        return msgspec.structs.replace(
            params, bad_words=None, bad_words_token_ids=self._tokenize_bad_words(params)
        )

    def _check_tokens(self, name: str, token_ids: Collection[int]) -> None:
        for token in (min(token_ids), max(token_ids)) if token_ids else ():
            if not 0 <= token < self.info.vocab_size:
                raise InvalidRequestError(
                    f"{name} contains token {token}. Valid tokens are 0 to "
                    f"{self.info.vocab_size - 1}.",
                    param=name,
                )

    def _max_prompt_tokens(self, params: SamplingParams) -> int:
        """Return the number of prompt tokens to keep; sys.maxsize without truncation."""
        limit, asked = self.info.max_model_len, params.truncate_prompt_tokens
        if asked is None:
            return sys.maxsize
        if asked > limit:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {asked}. The model's context is {limit} tokens.",
                param="truncate_prompt_tokens",
            )
        return max(1, limit - (params.max_tokens or 1)) if asked == -1 else asked

    def _tokenize_bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Return the tokens of bad words at the start of a text and after a space."""
        tokenizer = self.require_tokenizer()
        sequences = list(params.bad_words_token_ids or [])
        for word in params.bad_words or ():
            plain = tokenizer.encode(word, add_special_tokens=False)
            spaced = tokenizer.encode(" " + word.lstrip(" "), add_special_tokens=False)
            if spaced[-len(plain) :] == plain:  # the space is a separate token
                spaced = []
            sequences += [one for one in (plain, spaced) if one]
        return sequences

    def _check_token_remains(self, params: SamplingParams) -> None:
        """Raise InvalidRequestError if the parameters forbid every first token."""
        forbidden = {one[0] for one in params.bad_words_token_ids or () if len(one) == 1}
        if params.min_tokens:
            forbidden |= {*self._eos, *(params.stop_token_ids or ())}
        allowed = params.allowed_token_ids or range(self.info.vocab_size)
        if len(forbidden) >= len(allowed) and forbidden.issuperset(allowed):
            is_limited = params.allowed_token_ids is not None
            raise InvalidRequestError(
                f"All of {'allowed_token_ids' if is_limited else 'the tokens'} are forbidden by "
                "bad_words or min_tokens.",
                param="allowed_token_ids"
                if is_limited
                else "min_tokens"
                if params.min_tokens
                else "bad_words",
            )

    def _check_timestamps(self, token_ids: list[int], params: SamplingParams) -> None:
        """Raise InvalidParamError for a choice of tokens that excludes timestamps they need."""
        if self.info.hearing is None or not self.info.hearing.tokens.asks_for_timestamps(token_ids):
            return
        allowed = params.allowed_token_ids
        for name, excludes in (
            ("structured_outputs", params.structured_outputs is not None),
            (
                "allowed_token_ids",
                allowed is not None and not self.info.hearing.tokens.may_begin(allowed),
            ),
        ):
            if excludes:
                raise InvalidParamError(
                    name,
                    "excludes the timestamps that this prompt asks for. End it with "
                    "<|notimestamps|>.",
                )

    def require_generation(self) -> None:
        """Raise InvalidRequestError if the model does not generate text."""
        if not self.info.generates and self.info.pooling is not None:
            raise InvalidRequestError(
                f"This model generates no text. It serves {self.info.pooling.paths}.",
                param="model",
                code="model_not_supported",
            )

    def require_text(self, param: str) -> None:
        """Raise InvalidRequestError about `param` if prompts need sound."""
        if self.info.hearing is not None:
            raise no_sound_error(param)

    def require_tokenizer(self) -> Tokenizer:
        """Raise InvalidRequestError if the model has no tokenizer."""
        if self.tokenizer is None:
            raise InvalidRequestError(
                "This model's folder has no tokenizer. Use prompts of token ids and no stop "
                "strings, or select another tokenizer with --tokenizer."
            )
        return self.tokenizer

    def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        *,
        allow_special_tokens: bool = False,
        chat_template: str | None = None,
        **options: Any,
    ) -> list[int]:
        """Return the tokens of a conversation. For options see `ChatTemplates.render`.

        Only the template can write special tokens. In messages, tools and other options they are
        ordinary text, unless `allow_special_tokens`. A picture or clip (see `feature_places`) is
        one token."""
        tokenizer = self.require_tokenizer()

        def encode(given: dict[str, Any], stand_in: str = "") -> list[int]:
            separator = None
            if not allow_special_tokens:
                given, separator = tokenizer.protect(given)
            text = tokenizer.render_chat(chat_template=chat_template, **given)
            return self.encode_chat(text, separator, stand_in)

        given = {"messages": messages, **options}
        if not (count := count_places(messages)):
            return encode(given)
        with suppress(InvalidRequestError):
            if self.count_places(token_ids := encode(given)) == count:
                return token_ids
        return encode(*join_parts(given))

    def count_places(self, token_ids: Sequence[int]) -> int:
        """Return the number of places for pictures or clips in a prompt."""
        limits = self.info.sight or self.info.sound
        return 0 if limits is None else token_ids.count(limits.token_id)

    def encode_chat(self, text: str, separator: str | None, stand_in: str = "") -> list[int]:
        """Return the tokens of a rendered conversation. `stand_in`: see `feature_places`.

        Raises InvalidRequestError."""
        self.check_length(text)
        tokenizer = self.require_tokenizer()
        limits = self.info.sight or self.info.sound
        if limits is not None and stand_in:
            text = text.replace(stand_in, placeholder(tokenizer, limits.token_id))
        if self.info.sight is not None:
            text = frame_pictures(tokenizer, self.info.sight.tokens, text)
        return tokenizer.encode_chat(text, separator)

    def _tokenize(
        self, prompt: Prompt, *, has_pictures: bool = False
    ) -> tuple[str | None, list[int]]:
        given = plain_prompt(prompt)
        if isinstance(given, str):
            self.check_length(given)
            tokenizer, framed = self.require_tokenizer(), given
            if self.info.hearing is not None:  # it would surround the prompt
                return given, tokenizer.encode(given, add_special_tokens=False)
            if has_pictures and self.info.sight is not None:
                framed = frame_pictures(tokenizer, self.info.sight.tokens, given)
            return given, tokenizer.encode(framed)
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else None
        return text if isinstance(text, str) else None, given

    def _resolve_max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        limit = self.info.max_model_len
        if num_prompt_tokens > limit:
            raise ContextLengthError(limit, "prompt", num_prompt_tokens)
        room = limit - num_prompt_tokens
        # The engine generates at least one token: see `OutputProcessor`.
        max_tokens = max(1, room if params.max_tokens is None else params.max_tokens)
        if self._max_output is not None:
            max_tokens = min(max_tokens, self._max_output)
        if params.ends_with_context:
            return min(max_tokens, max(1, room))
        if max_tokens > room:
            raise ContextLengthError(limit, "prompt", num_prompt_tokens, max_tokens=max_tokens)
        return max_tokens


def require_text(prepared: Iterable[Prepared]) -> None:
    """Raise InvalidRequestError for pictures and clips, which a beam search would lose."""
    if any(one.features for one in prepared):
        raise InvalidRequestError(
            "Beam search takes text alone: the prompt has a picture or a clip.", param="messages"
        )


def load_default_sampling(folder: Path, model: ModelConfig) -> dict[str, Any]:
    """Return the sampling defaults of a model, as SamplingParams fields.

    They are those of a generation_config.json, replaced by those of the command line.
    `do_sample: false` means greedy decoding. Raises CheckpointError for values out of range, and
    ConfigError if the folder of --generation-config has no such file."""
    path, given = _generation_config(folder, model)
    try:
        return default_sampling({**given, **(model.override_generation_config or {})})
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from None


def load_output_limit(folder: Path, model: ModelConfig) -> int | None:
    """Return the most output tokens of a request. None: no limit but the context.

    Only the operator sets one: by --override-generation-config, or in the file of
    --generation-config. Raises as `load_default_sampling` does."""
    path, given = _generation_config(folder, model)
    limit = given.get(OUTPUT_LIMIT) if model.generation_config is not None else None
    limit = (model.override_generation_config or {}).get(OUTPUT_LIMIT, limit)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise CheckpointError(
            f"{path} cannot be used: {OUTPUT_LIMIT} must be a whole number of at least 1; got "
            f"{limit!r}."
        )
    return limit


def _generation_config(folder: Path, model: ModelConfig) -> tuple[Path, dict[str, Any]]:
    """Return the path and the content of the generation_config.json that the settings choose."""
    source = model.generation_config
    path = (folder if source is None else Path(source).expanduser()) / "generation_config.json"
    text = None if source == "none" else read_file(path.parent, path.name)
    if text is None and source not in (None, "none"):
        raise ConfigError(
            f"--generation-config: there is no {path}. Give a folder that has one, or none.",
            param="generation_config",
        )
    try:
        return path, dict(parse_json(text or "{}"))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from None


def load_model_type(folder: Path) -> str:
    """Read the family of a model, such as `llama`; `unknown` if its configuration has none."""
    try:
        found = parse_json(read_file(folder, "config.json") or "{}")["model_type"]
    except (ValueError, TypeError, KeyError, OSError, ToolkitError):
        found = None
    return found if isinstance(found, str) else "unknown"


def load_gguf_type(folder: Path) -> str | None:
    """Return the quantization of a GGUF file, such as Q4_K_M; None for another model."""
    if not is_gguf(folder):
        return None
    return read_gguf(folder).mixture or quantization_of(folder.name)


def plain_prompt(prompt: Prompt) -> str | list[int]:
    """Return a prompt's text or token ids. Raises InvalidRequestError if it has neither."""
    given: object = prompt
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            return _check_ids(prompt["prompt_token_ids"])
        given = prompt.get("prompt")
        if not isinstance(given, str):
            raise InvalidRequestError(
                'A prompt must be text, a list of token ids, {"prompt": text} or '
                '{"prompt_token_ids": ids}.',
                param="prompt",
            )
    return given if isinstance(given, str) else _check_ids(given)


def _check_ids(ids: object) -> list[int]:
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise InvalidRequestError(
            "A prompt of token ids must be a list of integers.", param="prompt"
        )
    return ids
