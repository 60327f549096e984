"""The engines that are compared, one after the other, and what they answer."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from toolkit.config import EngineConfig
from toolkit.engine.llm import LLM
from toolkit.engine.outputs import PositionLogprobs, RequestOutput
from toolkit.kernels.switch import Version, only_pytorch
from toolkit.sampling.params import SamplingParams
from toolkit.text.tokenizer import Tokenizer
from toolkit.verify.compare import NUM_LIKELIEST, Scored
from toolkit.verify.prompts import (
    CACHED_TOKENS,
    NEW_TOKENS,
    Question,
    Sizes,
    make_filler,
    make_prompts,
)
from toolkit.worker import WorkerInfo

MOST_GROUPS = 4
"""Groups of layers with pages of their own: more than any model has."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Greedy answers of one engine to the same prompts, computed in several ways.

    Lists are in the order of the prompts; `cached` has them several times."""

    info: WorkerInfo
    tokenizer: Tokenizer | None
    alone: list[Scored]  # one at a time, without cached prefixes
    together: list[Scored]  # in one batch, in chunks
    cached: list[Scored]  # one at a time, from cached prefixes, perhaps again after their eviction
    why_eager: str | None  # reason why no step was a CUDA graph or a recorded one; None: some were

    @property
    def sequences(self) -> list[Question]:
        """Prompts and answers. Only the last may have a picture.

        Its answer ends before a token that would stand for another one."""
        found = [Question(one.tokens) for one in self.alone]
        if (sight := self.info.sight) is not None:
            tokens = list(found.pop().tokens)
            prompt, rest = tokens[:-NEW_TOKENS], tokens[-NEW_TOKENS:]
            places = {sight.tokens.place, sight.tokens.placeholder}
            answer = itertools.takewhile(lambda token: token not in places, rest)
            found.append(Question([*prompt, *answer], has_picture=True))
        return found


def answer(config: EngineConfig, sizes: Sizes, *, evicts: bool) -> Answers:
    """Load an engine with the kernels that are served, and ask it.

    `evicts`: ask again after other prompts have evicted the cached prefixes."""
    config = config.with_settings(
        max_model_len=sizes.context, num_gpu_blocks_override=sizes.num_blocks, swap_space=0.0
    )
    with _loaded(config) as llm:
        limits = llm.info.sight or llm.info.sound
        place = None if limits is None else limits.token_id
        prompts = make_prompts(sizes, llm.tokenizer, llm.info.vocab_size, place)
        k = _num_likeliest(llm)
        scoring = _greedy(NEW_TOKENS, logprobs=k, prompt_logprobs=k)
        alone = [one for prompt in prompts for one in _generate(llm, [prompt], scoring)]
        llm.reset_prefix_cache()
        together = _generate(llm, prompts, _greedy(NEW_TOKENS, logprobs=k))
        cached: list[Scored] = []
        if config.cache.enable_prefix_caching:
            few = _greedy(CACHED_TOKENS, logprobs=k)
            for after_eviction in (False, True)[: 1 + evicts]:
                if after_eviction:
                    _generate(llm, make_filler(sizes, llm.info.vocab_size, place), _greedy(1))
                cached += [one for prompt in prompts for one in _generate(llm, [prompt], few)]
        return Answers(llm.info, llm.tokenizer, alone, together, cached, llm.why_eager())


def score(
    config: EngineConfig, sizes: Sizes, sequences: Sequence[Question], version: Version
) -> list[Scored]:
    """Return what plain PyTorch computes for sequences: each alone, in one step, in `config`."""
    config = config.with_settings(
        attention_backend="torch",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=sizes.context,
        num_gpu_blocks_override=MOST_GROUPS * -(-sizes.context // sizes.block_size),
        swap_space=0.0,
        max_num_seqs=1,
        max_num_batched_tokens=sizes.context,
    )
    with only_pytorch(version), _loaded(config) as llm:
        k = _num_likeliest(llm)
        params = _greedy(1, logprobs=k, prompt_logprobs=k)
        # The last token's log-probability is that of the answer's first.
        prompts = [Question(tokens[:-1], has_picture) for tokens, has_picture in sequences]
        return [one for prompt in prompts for one in _generate(llm, [prompt], params)]


@contextmanager
def _loaded(config: EngineConfig) -> Iterator[LLM]:
    """Load an engine, and free its memory at the end: before the next one is loaded."""
    gc.freeze()  # the collection skips what is there: 0.4 s for the objects of all modules
    try:
        llm = LLM(config=config)
        try:
            yield llm
        finally:
            llm.shutdown()
    finally:
        gc.collect()
        gc.unfreeze()


def _num_likeliest(llm: LLM) -> int:
    return min(NUM_LIKELIEST, llm.info.vocab_size - 1)


def _greedy(
    max_tokens: int, logprobs: int | None = None, prompt_logprobs: int | None = None
) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _generate(llm: LLM, prompts: Sequence[Question], params: SamplingParams) -> list[Scored]:
    results = llm.generate([one.prompt for one in prompts], params, use_tqdm=False)
    return [_scored(result) for result in results]


def _scored(result: RequestOutput) -> Scored:
    (output,) = result.outputs
    listed: list[PositionLogprobs | None] = [
        *(result.prompt_logprobs or [None] * len(result.prompt_token_ids)),
        *(output.logprobs or ()),
    ]
    chances = {
        position: {token: one.logprob for token, one in tokens.items()}
        for position, tokens in enumerate(listed)
        if tokens is not None
    }
    return Scored([*result.prompt_token_ids, *output.token_ids], chances)
