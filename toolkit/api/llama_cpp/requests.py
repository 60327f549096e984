"""Body of POST /completion."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool

from toolkit.api.http.body_fields import FAIL_FAST, RequestBody, Text, encodable
from toolkit.api.http.client_fields import REFUSED_IN_LLAMA_COMPLETIONS
from toolkit.api.llama_cpp.sampling import NO_LIMIT, PARAM_NAMES, LlamaSampling
from toolkit.api.openai.response_format import Schema, resolve_constraint
from toolkit.api.openai.schemas import MAX_BIASES, Int, answer_params
from toolkit.errors import InvalidParamError
from toolkit.sampling.params import MAX_TEXT, SamplingParams
from toolkit.text.tokenizer import Tokenizer

MAX_PROMPTS = 2048
LlamaPrompt = str | list[int | str]
_ID_DIGITS = 10  # at most, of a token id
_NOT_READ = "Not read: "


def _read_prompts(given: Any) -> list[LlamaPrompt]:
    """Return the prompts: a list of texts is several, and one with a token id at its top is one."""
    is_several = isinstance(given, list) and not any(type(one) is int for one in given)
    prompts = given if is_several else [given]
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"must be one to {MAX_PROMPTS} prompts; got {len(prompts)}")
    return [_read_prompt(one) for one in prompts]


def _read_prompt(given: Any) -> LlamaPrompt:
    if isinstance(given, dict):
        if given.get("multimodal_data"):
            raise ValueError(
                "takes no multimodal_data: send pictures to /v1/chat/completions, as image_url"
            )
        given = given.get("prompt_string")
    is_list = isinstance(given, list) and all(type(one) in (int, str) for one in given)
    if not (is_list or isinstance(given, str)):
        raise ValueError("must be a text, token ids and texts, or a list of such prompts")
    prompt: LlamaPrompt = encodable(given)
    return prompt


class LlamaCompletionRequest(LlamaSampling, RequestBody):
    """POST /completion."""

    model_config = ConfigDict(json_schema_extra={"example": {"prompt": "The sea", "n_predict": 8}})

    refused_fields: ClassVar[Mapping[str, str]] = REFUSED_IN_LLAMA_COMPLETIONS

    model: str | None = None
    prompt: Annotated[Any, BeforeValidator(_read_prompts)] = Field(
        description="A text, token ids, ids and texts, or a list of such prompts"
    )
    stream: StrictBool = False
    n_predict: int | None = Field(
        None,
        description="Maximum tokens to generate, up to the end of the context; -1: up to it; 0: "
        "only compute the prompt",
    )
    max_tokens: int | None = Field(None, description="Read without n_predict")
    n_cmpl: Int = Field(1, description="Number of answers to each prompt")
    top_n_sigma: float | None = Field(None, description="Only -1 is supported")
    ignore_eos: StrictBool = False
    logit_bias: Any = Field(
        None, description="Lists of a token id or text, and a number or false: never this token"
    )
    n_probs: int = Field(0, ge=0, description="Likeliest tokens to report at each position")
    grammar: Text = Field("", description="Grammar of the answer, in GBNF or Lark")
    json_schema: Schema | None = Field(
        None, description="JSON schema that the answer satisfies; {}: any JSON"
    )
    return_tokens: StrictBool = Field(False, description="Also return token ids; streams have them")
    response_fields: Annotated[list[Text], FAIL_FAST] | None = Field(
        None, description="Fields to return, such as generation_settings/n_predict"
    )
    timings_per_token: StrictBool = Field(False, description="Add timings to each event")
    cache_prompt: Any = Field(None, description=_NOT_READ + "common prefixes are always cached")
    n_cache_reuse: Any = Field(None, description=_NOT_READ + "the cache is not shifted")
    id_slot: Any = Field(None, description=_NOT_READ + "requests have no fixed slots")
    n_keep: Any = Field(None, description=_NOT_READ + "a prompt that is too long is an error")

    @property
    def prompts(self) -> list[LlamaPrompt]:
        prompts: list[LlamaPrompt] = self.prompt
        return prompts

    @property
    def param_names(self) -> Mapping[str, str]:
        """The engine's parameters whose names differ here."""
        return PARAM_NAMES | {"logprobs": "n_probs", "n": "n_cmpl"}

    def params(self, defaults: Mapping[str, Any], tokenizer: Tokenizer | None) -> SamplingParams:
        """`defaults`: of sampling. Raises InvalidRequestError for an unsupported option."""
        self.require_off("top_n_sigma", -1)
        limit = self.max_tokens if self.n_predict is None else self.n_predict
        biases = dict(_read_biases(self.logit_bias, tokenizer))
        return answer_params(
            defaults,
            None if limit in NO_LIMIT else limit,
            {**self.sampling(), "n": self.n_cmpl},
            may_be_empty=True,
            structured_outputs=resolve_constraint(None, None, self.grammar, self.json_schema),
            logprobs=self.n_probs or None,
            logit_bias={t: bias for t, bias in biases.items() if bias is not False} or None,
            bad_words_token_ids=[[t] for t, bias in biases.items() if bias is False] or None,
            ignore_eos=self.ignore_eos,
            ends_with_context=True,
        )


def _read_biases(given: Any, tokenizer: Tokenizer | None) -> Iterator[tuple[int, float]]:
    """Yield tokens and biases, False for a token that is never chosen."""
    pairs = list(given.items()) if isinstance(given, dict) else given or []
    if not isinstance(pairs, list) or len(pairs) > MAX_BIASES:
        raise InvalidParamError("logit_bias", f"must be a list of at most {MAX_BIASES} pairs.")
    length = 0
    for pair in pairs:
        match pair:
            case [int() as token, float() | int() as bias] if bias is not True:
                yield token, bias
            case [str() as text, float() | int() as bias] if bias is not True:
                if isinstance(given, dict) and text.isdecimal() and len(text) <= _ID_DIGITS:
                    yield int(text), bias
                    continue
                length += len(text)
                if length > MAX_TEXT:
                    raise InvalidParamError(
                        "logit_bias", f"takes texts of at most {MAX_TEXT} characters in all."
                    )
                if tokenizer is not None:
                    for token in tokenizer.encode(text, add_special_tokens=False):
                        yield token, bias
            case _:
                raise InvalidParamError(
                    "logit_bias", "must have pairs such as [15043, 1.5] or [15043, false]."
                )
