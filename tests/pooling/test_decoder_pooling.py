"""Pooling in decoders: in chunks, with preemption, and mixed with generation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from tests import checkpoints
from tests.models.architectures import POSITIONS
from toolkit import LLM, SamplingParams
from toolkit.config import EngineConfig
from toolkit.engine.core import EngineCore
from toolkit.engine.front.pooled_prompts import as_vector
from toolkit.engine.messages import EngineRequest
from toolkit.errors import CheckpointError, InvalidRequestError
from toolkit.executor import UniprocExecutor
from toolkit.sampling.params import PoolingParams
from toolkit.scheduler.speculation import StepTimes
from toolkit.sequence import SequenceSpec
from toolkit.worker.startup.warm_up import WarmUp

PROMPTS = [[(7 * i + n) % 250 for i in range(n)] for n in (1, 5, 16, 33, 70, POSITIONS)]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def expected(model, mode, prompts=PROMPTS):
    """Pool and normalize Transformers' last hidden states."""
    vectors = []
    for prompt in prompts:
        with torch.no_grad():
            hidden = model.base_model(torch.tensor([prompt])).last_hidden_state[0]
        pooled = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0)}[mode]
        vectors.append(normalize(pooled, dim=0).numpy())
    return np.array(vectors)


def embed(llm, prompts=PROMPTS):
    return np.array([one.outputs.embedding for one in llm.embed(prompts)])


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("llama3-gqa", mode) for mode in ("last", "mean", "cls")),
        *[("gpt2", "mean"), ("qwen3", "last"), ("mistral-window", "cls")],
    ],
)
def test_pooling_in_chunks_equals_transformers(name, mode, checkpoint):
    llm = LLM(str(checkpoint(name)), pooling=mode, max_num_batched_tokens=24, num_threads=1)
    assert np.abs(embed(llm) - expected(checkpoints.make_reference(name), mode)).max() < 1e-4


def test_pooling_model_still_generates(checkpoint):
    folder, reference = checkpoint("llama3-gqa"), checkpoints.make_reference("llama3-gqa")
    llm = LLM(str(folder), pooling="last", num_threads=1)
    assert llm.info.tasks == ["generate", "embed"]
    embed(llm)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    [answer] = llm.generate([PROMPTS[3]], params)
    assert answer.outputs[0].token_ids == checkpoints.greedy(reference, PROMPTS[3], 20)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("more", [{}, {"speculative_config": NGRAM}], ids=["plain", "drafts"])
def test_pooling_mixed_with_generation_and_preemption(monkeypatch, overlap, more, checkpoint):
    """Preempted prompts start again, with the same result. Steps may verify others' drafts."""
    monkeypatch.setattr(WarmUp, "step_times", lambda *_: StepTimes())  # all drafts are useful
    folder, reference = checkpoint("llama3-gqa"), checkpoints.make_reference("llama3-gqa")
    config = EngineConfig.from_settings(
        {
            "model": str(folder),
            "pooling": "mean",
            "max_num_batched_tokens": 20,
            "max_num_seqs": 12,
            "num_gpu_blocks_override": 12,
            "swap_space": 0.01,
            "async_scheduling": overlap,
            "num_threads": 1,
        }
        | more
    )
    core = EngineCore(config, UniprocExecutor(config, folder, lambda name, seconds: None))
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    pooled = [prompt for prompt in PROMPTS if len(prompt) <= 100] * 2
    right, generated = expected(reference, "mean", pooled), {}
    for number, prompt in enumerate(pooled):
        core.add(request(2 * number, prompt, SamplingParams(max_tokens=1), PoolingParams()))
        start = PROMPTS[2][: 1 + number]
        predicted = checkpoints.greedy(reference, start, 40) if more else []
        core.add(request(2 * number + 1, start, greedy, None, predicted))
        generated[2 * number + 1] = []
    vectors = {}
    num_preemptions = num_accepted = 0
    while core.has_work:
        message = core.step()[0]
        num_preemptions += message.stats.num_preemptions
        num_accepted += message.stats.spec_decode_num_accepted_tokens
        for output in message.outputs:
            assert output.error is None
            if output.embedding:
                vectors[output.number // 2] = as_vector(output.embedding)
                assert output.token_ids == []
            else:
                generated[output.number] += output.token_ids
        numbers, tokens = (
            np.frombuffer(message.numbers, np.int64),
            np.frombuffer(message.token_ids, np.int32),
        )
        for number, token in zip(numbers.tolist(), tokens.tolist(), strict=True):
            generated[number].append(token)
    assert num_accepted > 100 if more else num_preemptions > 0
    assert core.stats().kv_cache_usage == 0.0
    ours = np.array([vectors[i] for i in range(len(pooled))])
    assert np.abs(ours - right).max() < 1e-4
    for number, tokens in generated.items():
        prompt = PROMPTS[2][: 1 + number // 2]
        assert tokens == checkpoints.greedy(reference, prompt, 40)


def request(number, prompt, params, pooling, predicted=()):
    return EngineRequest(
        id=str(number),
        number=number,
        spec=SequenceSpec(
            prompt_token_ids=prompt,
            params=params,
            max_tokens=params.max_tokens,
            eos_token_ids=[],
            pooling=pooling,
            prediction_token_ids=list(predicted),
        ),
    )


def test_decoder_without_a_head_only_embeds(checkpoint, tmp_path):
    """sentence-transformers saves only the base model, its tensors without prefix."""
    reference = checkpoints.make_reference("qwen3")
    checkpoints.save(reference.base_model, tmp_path)
    llm = LLM(str(tmp_path), num_threads=1)
    assert llm.info.tasks == ["embed"]
    assert np.abs(embed(llm) - expected(reference, "last")).max() < 1e-4
    with pytest.raises(InvalidRequestError, match="generates no text"):
        llm.generate([[1, 2, 3]])


def test_sentence_transformers_folder_of_a_decoder(tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    checkpoints.save(checkpoints.make_reference("qwen3").base_model, tmp_path / "model")
    checkpoints.edit_json(
        tmp_path / "model" / "tokenizer_config.json", pad_token="<|endoftext|>", padding_side="left"
    )
    (tmp_path / "model" / "chat_template.jinja").unlink()  # or texts would become messages
    transformer = Transformer(str(tmp_path / "model"))
    reference = SentenceTransformer(
        modules=[transformer, Pooling(32, pooling_mode="lasttoken"), Normalize()], device="cpu"
    )
    reference.save(str(tmp_path / "saved"))
    texts = ["The sea is calm.", "A cat", "something rather longer than that"]
    ours = embed(LLM(str(tmp_path / "saved"), num_threads=1), texts)
    assert np.abs(ours - reference.encode(texts)).max() < 1e-4


def test_embeddings_are_truncated_only_if_supported(checkpoint, tmp_path):
    reference = checkpoints.make_reference("llama3-gqa")
    folder = checkpoints.save(reference, tmp_path)
    with pytest.raises(InvalidRequestError, match="32 dimensions and were not trained to be cut"):
        LLM(str(folder), pooling="last", num_threads=1).embed(PROMPTS, dimensions=8)
    checkpoints.edit_json(folder / "config.json", matryoshka_dimensions=[8, 16])
    llm = LLM(str(folder), pooling="last", num_threads=1)
    cut = np.array([one.outputs.embedding for one in llm.embed(PROMPTS, dimensions=8)])
    first = expected(reference, "last")[:, :8]
    assert np.abs(cut - first / np.linalg.norm(first, axis=1, keepdims=True)).max() < 1e-4
    with pytest.raises(InvalidRequestError, match="dimensions must be one of 8, 16; got 9"):
        llm.embed(PROMPTS, dimensions=9)


def test_prompts_have_the_forms_of_generation(checkpoint):
    llm = LLM(str(checkpoint("llama3-gqa")), pooling="last", num_threads=1)
    ids = llm.tokenize("A sea")
    given = ["A sea", ids, {"prompt": "A sea"}, {"prompt_token_ids": ids}]
    first, *others = embed(llm, given)
    assert all((other == first).all() for other in others)
    assert (embed(llm, {"prompt_token_ids": ids}) == [first]).all()
    for wrong in ({}, {"prompt_token_ids": "A"}, None, [None], {"prompt": 5}, [["a"]]):
        with pytest.raises(InvalidRequestError, match="prompt"):
            llm.embed([wrong])


def test_generative_model_names_the_pooling_setting(checkpoint):
    llm = LLM(str(checkpoint("gpt2")), num_threads=1)
    for call in (lambda: llm.embed("text"), lambda: llm.score("a", "b")):
        with pytest.raises(InvalidRequestError, match="--pooling last"):
            call()


def test_pooling_that_needs_the_complete_prompt_is_refused(tmp_path):
    checkpoints.save(checkpoints.make_reference("gpt2"), tmp_path)
    (tmp_path / "modules.json").write_text(
        '[{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"}]'
    )
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "max"}')
    with pytest.raises(
        CheckpointError, match="For decoders tk supports one of lasttoken, mean, cls"
    ):
        LLM(str(tmp_path), num_threads=1)
