"""Beam search against Transformers' own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests import checkpoints
from tests.combinations import pairwise
from toolkit import LLM, BeamSearchParams
from toolkit.errors import InvalidRequestError

NAME = "llama3-gqa"
PROMPTS = ["The sea is", "a", "What is a KV cache?"]


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    model = checkpoints.make_reference(NAME)
    with torch.no_grad():  # makes the end token likely enough to occur
        model.lm_head.weight[checkpoints.EOS] *= 1.6
    return model


@pytest.fixture(scope="module")
def llm(reference: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = checkpoints.save(reference, tmp_path_factory.mktemp("models") / "beams")
    llm = LLM(str(folder), device="cpu", num_gpu_blocks_override=512)
    yield llm
    llm.shutdown()


def expected(
    model: torch.nn.Module, prompt: list[int], params: BeamSearchParams
) -> list[tuple[list[int], float]]:
    """Return (tokens up to the end, score) of Transformers' beams, best first."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            do_sample=False,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=checkpoints.VOCAB + 1 if params.ignore_eos else checkpoints.EOS,
            pad_token_id=checkpoints.VOCAB - 1,
            output_scores=True,
            return_dict_in_generate=True,
        )
    beams = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        if checkpoints.EOS in tokens and not params.ignore_eos:
            tokens = tokens[: tokens.index(checkpoints.EOS) + 1]
        beams.append((tokens[: params.max_tokens], score))
    return beams


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "width"),
    pairwise([False, True, "never"], [1.0, 0.0, 2.5, -1.0], [2, 5]),
)
def test_beams_match_transformers(
    llm: LLM,
    reference: torch.nn.Module,
    width: int,
    length_penalty: float,
    early_stopping: bool | str,
) -> None:
    params = BeamSearchParams(
        beam_width=width,
        max_tokens=12,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        beams = expected(reference, llm.tokenize(prompt), params)
        assert [one.token_ids for one in output.outputs] == [tokens for tokens, _ in beams]
        for one, (tokens, score) in zip(output.outputs, beams, strict=True):
            assert one.cumulative_logprob / len(tokens) ** length_penalty == pytest.approx(
                score, abs=1e-3
            )


def search_plainly(
    model: torch.nn.Module, prompt: list[int], width: int, count: int
) -> list[tuple[list[int], list[float]]]:
    """Return (tokens, their log-probabilities) of the likeliest beams, by trying every token."""
    beams: list[tuple[list[int], list[float]]] = [([], [])]
    for _ in range(count):
        scores = [
            checkpoints.logits(model, prompt + tokens)[-1].log_softmax(-1) for tokens, _ in beams
        ]
        every = [
            ([*tokens, token], [*logprobs, logprob])
            for (tokens, logprobs), row in zip(beams, scores, strict=True)
            for token, logprob in enumerate(row.tolist())
        ]
        beams = sorted(every, key=lambda beam: -sum(beam[1]))[:width]
    return beams


@pytest.mark.parametrize("num_logprobs", [0, 2, 20])
def test_logprobs_equal_those_of_a_plain_search(
    llm: LLM, reference: torch.nn.Module, num_logprobs: int
) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=4, ignore_eos=True, logprobs=num_logprobs)
    prompt = llm.tokenize(PROMPTS[0])
    [output] = llm.beam_search(PROMPTS[:1], params)
    beams = search_plainly(reference, prompt, 4, 4)
    assert [one.token_ids for one in output.outputs] == [tokens for tokens, _ in beams]
    for one, (tokens, logprobs) in zip(output.outputs, beams, strict=True):
        chosen = [next(iter(position.items())) for position in one.logprobs]
        assert [token for token, _ in chosen] == tokens
        assert [entry.logprob for _, entry in chosen] == pytest.approx(logprobs, abs=1e-4)
        scores = checkpoints.logits(reference, prompt + tokens)[len(prompt) - 1 : -1]
        for position, row in zip(one.logprobs, scores.log_softmax(-1), strict=True):
            likeliest = row.topk(num_logprobs).indices.tolist()
            assert position.keys() == {next(iter(position)), *likeliest}
            for token, entry in position.items():
                assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
                assert entry.rank == (row > row[token]).sum() + 1


def test_some_of_these_beams_end_early(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=12, length_penalty=0.0)
    reasons = {
        one.finish_reason for output in llm.beam_search(PROMPTS, params) for one in output.outputs
    }
    assert "stop" in reasons


def test_ignore_eos_ignores_the_end_token(llm: LLM, reference: torch.nn.Module) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    output = llm.beam_search(PROMPTS[0], params)[0]
    assert [one.token_ids for one in output.outputs] == [
        tokens for tokens, _ in expected(reference, llm.tokenize(PROMPTS[0]), params)
    ]
    assert {one.finish_reason for one in output.outputs} == {"length"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 65),
        ("max_tokens", 0),
        ("early_stopping", "always"),
        ("length_penalty", 99),
        ("logprobs", 101),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4} | {name: value})


@pytest.mark.parametrize("wrong", [["a"], [None], [[1]], "abc"])
def test_invalid_stop_tokens_are_refused(wrong):
    with pytest.raises(InvalidRequestError, match="stop_token_ids must contain token ids"):
        BeamSearchParams(beam_width=2, max_tokens=3, stop_token_ids=wrong)


def test_stop_tokens_outside_the_vocabulary_are_refused(llm):
    for wrong in (9999, -4):
        params = BeamSearchParams(beam_width=2, max_tokens=3, stop_token_ids=[wrong])
        with pytest.raises(InvalidRequestError, match=f"stop_token_ids contains token {wrong}"):
            llm.beam_search([[1, 2]], params)
    without_stops = BeamSearchParams(beam_width=2, max_tokens=3, stop_token_ids=None)
    assert len(llm.beam_search([[1, 2]], without_stops)[0].outputs) == 2
