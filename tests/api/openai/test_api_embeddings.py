"""/v1/embeddings, /v1/score and /v1/rerank."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import msgspec
import numpy as np
import ollama
import openai
import pytest

from tests import checkpoints
from tests.local import LocalServer
from tests.server import WAIT, Server, until
from toolkit.api.pooling.embeddings import EmbeddingList

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

QUERY = "What is the sea like?"
DOCUMENTS = ["Bread is baked.", "The sea is calm.", "It likes fish.", "What the sea is like"]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from tests.pooling.folders import MINILM

    served = LocalServer(
        str(MINILM), "--served-model-name", "minilm", cwd=tmp_path_factory.mktemp("minilm")
    )
    yield served
    until(served.is_idle)
    served.stop()


@pytest.fixture(scope="module")
def sentences() -> SentenceTransformer:
    from sentence_transformers import SentenceTransformer

    from tests.pooling.folders import MINILM

    return SentenceTransformer(str(MINILM), device="cpu")


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.pooling.folders import bert, bert_tokenizer, save

    model = bert("BertForSequenceClassification", num_labels=1)
    return save(model, bert_tokenizer(), tmp_path_factory.mktemp("models") / "cross-encoder")


@pytest.fixture(scope="module")
def scorer(cross_encoder: Path) -> Iterator[Server]:
    served = LocalServer(str(cross_encoder), cwd=cross_encoder.parent)
    yield served
    until(served.is_idle)
    served.stop()


@pytest.fixture(scope="module")
def decoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model with Matryoshka embeddings."""
    folder = tmp_path_factory.mktemp("models") / "decoder"
    checkpoints.save(checkpoints.make_reference("llama3-gqa"), folder)
    checkpoints.edit_json(folder / "config.json", is_matryoshka=True)
    return folder


SMALL_STEPS = ("--pooling", "mean", "--max-num-batched-tokens", "128")
"""Generate and embed in small steps, so many inputs take long."""


@pytest.fixture(scope="module")
def decoder(decoder_folder: Path) -> Iterator[Server]:
    served = LocalServer(str(decoder_folder), *SMALL_STEPS, cwd=decoder_folder.parent)
    yield served
    until(served.is_idle)
    served.stop()


def error(answer: httpx.Response, status: int = 400) -> dict:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def vectors(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.array([one["embedding"] for one in answer.json()["data"]])


def test_openai_client_gets_sentence_transformers_vectors(minilm, sentences):
    from tests.pooling.folders import TEXTS

    with minilm.openai() as client:
        answer = client.embeddings.create(model="minilm", input=TEXTS)  # base64 by default
    assert [one.index for one in answer.data] == list(range(len(TEXTS)))
    found = np.array([one.embedding for one in answer.data])
    assert np.abs(found - sentences.encode(TEXTS)).max() < 1e-5
    assert answer.model == "minilm"
    num_tokens = sum(len(sentences.tokenizer(text)["input_ids"]) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == num_tokens


def test_ollama_client_gets_the_same_vectors(minilm):
    given = [*DOCUMENTS, "sea " * 2000]
    cut = {"input": given, "truncate_prompt_tokens": -1}
    wanted = vectors(minilm.http.post("/v1/embeddings", json=cut))
    with ollama.Client(minilm.url) as client:
        found = client.embed("minilm:latest", given)
        one = client.embeddings("minilm", DOCUMENTS[0])
        assert "embedding" in client.show("minilm").capabilities
        with pytest.raises(ollama.ResponseError, match="generates no text"):
            client.chat("minilm", [{"role": "user", "content": "x"}])
    assert np.abs(np.array(found.embeddings) - wanted).max() < 1e-5
    assert np.abs(np.array(one.embedding) - wanted[0]).max() < 1e-5
    assert (found.model, found.total_duration > 0) == ("minilm", True)
    assert found.prompt_eval_count > len(given)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": "sea " * 2000, "truncate": False}, "maximum context length"),
        ({"input": "x", "dimensions": 10**6}, "dimensions"),
        ({"input": ["x"] * 2049}, "at most 2048 texts"),
        ({"input": 3}, "input"),
        ({"input": "x", "model": "none"}, "not served"),
    ],
)
def test_ollama_embeddings_are_refused_with_a_reason(minilm, body, words):
    answer = minilm.http.post("/api/embed", json=body)
    assert answer.status_code == (404 if "model" in body else 400)
    assert words in answer.json()["error"]


@pytest.mark.parametrize("body", [{"input": []}, {"input": ""}, {}])
def test_ollama_embeds_no_texts(minilm, body):
    answer = minilm.http.post("/api/embed", json=body).json()
    assert (answer["embeddings"], answer["prompt_eval_count"]) == ([], 0)
    assert minilm.http.post("/api/embeddings", json={"prompt": ""}).json() == {"embedding": []}


async def test_async_client_gets_the_same_vectors(minilm, sentences):
    async with openai.AsyncOpenAI(
        base_url=f"{minilm.url}/v1", api_key="any", max_retries=0
    ) as client:
        answer = await client.embeddings.create(
            model="minilm", input="A cat", encoding_format="float"
        )
    assert np.abs(np.array(answer.data[0].embedding) - sentences.encode("A cat")).max() < 1e-5


def test_text_tokens_and_both_encodings_are_equal(minilm, sentences):
    ids = sentences.tokenizer("A cat sits.")["input_ids"]
    inputs = ["A cat sits.", ["A cat sits."], ids, [ids]]
    found = [vectors(minilm.http.post("/v1/embeddings", json={"input": one})) for one in inputs]
    assert all((one == found[0]).all() for one in found)
    body = {"input": "A cat sits.", "encoding_format": "base64"}
    answer = minilm.http.post("/v1/embeddings", json=body)
    [item] = msgspec.json.decode(answer.content, type=EmbeddingList).data
    decoded = np.frombuffer(base64.b64decode(item.embedding), "<f4")
    assert (decoded == found[0][0].astype("<f4")).all()


def test_long_text_is_refused_or_truncated_on_request(minilm, sentences):
    long = "and on " * 400
    found = error(minilm.http.post("/v1/embeddings", json={"input": ["short", long]}))
    assert found["param"] == "input"
    assert found["code"] == "context_length_exceeded"
    assert found["message"].startswith(
        "This model's maximum context length is 256 tokens. However, your input[1] resulted in 802 "
    )
    cut = minilm.http.post("/v1/embeddings", json={"input": long, "truncate_prompt_tokens": -1})
    assert np.abs(vectors(cut)[0] - sentences.encode(long)).max() < 1e-5
    assert cut.json()["usage"]["prompt_tokens"] == 256


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "either input or messages"),
        ({"input": []}, "input", "empty"),
        ({"input": [["a"]]}, "input[0][0]", "must be an integer; got"),
        ({"input": [[1, 30522]]}, "input", "0 to 30521"),
        ({"input": [[1], [-1]]}, "input[1]", "0 to 30521"),
        ({"input": [[1], []]}, "input[1]", "empty"),
        ({"input": ["x"] * 2049}, "input", "at most 2048"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "x", "dimensions": 64}, "dimensions", "384 dimensions"),
        ({"input": "x", "dimensions": 0}, "dimensions", "from 1 to 384"),
        ({"input": "x", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "from 1 to 256"),
    ],
)
def test_invalid_field_is_named(body, param, message, minilm):
    found = error(minilm.http.post("/v1/embeddings", json=body))
    assert found["param"] == param
    assert message in found["message"]


def test_embedding_model_refuses_to_generate(minilm):
    for path, body in (
        ("completions", {"prompt": "x"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        assert "/v1/embeddings" in error(minilm.http.post(f"/v1/{path}", json=body))["message"]
    assert minilm.http.get("/v1/models").json()["data"][0]["tasks"] == ["embed"]
    assert minilm.http.get("/health").status_code == 200
    assert minilm.curl.startswith(f"curl {minilm.url}/v1/embeddings")


def test_texts_are_scored_by_their_embeddings(minilm, sentences):
    expected = sentences.similarity(sentences.encode(QUERY), sentences.encode(DOCUMENTS))[0].numpy()
    answer = minilm.http.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()
    assert [one["index"] for one in answer["data"]] == list(range(len(DOCUMENTS)))
    assert np.abs(np.array([one["score"] for one in answer["data"]]) - expected).max() < 1e-5
    by_pair = {"text_1": DOCUMENTS, "text_2": DOCUMENTS}
    same = minilm.http.post("/v1/score", json=by_pair).json()["data"]
    assert np.allclose([one["score"] for one in same], 1.0)
    uneven = {"text_1": DOCUMENTS[:2], "text_2": DOCUMENTS}
    assert "text_1 has 2 texts" in error(minilm.http.post("/v1/score", json=uneven))["message"]


def test_cross_encoder_scores_pairs_and_ranks_documents(scorer, cross_encoder):
    from sentence_transformers import CrossEncoder

    expected = CrossEncoder(str(cross_encoder), device="cpu").predict(
        [(QUERY, one) for one in DOCUMENTS]
    )
    answer = scorer.http.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()
    assert np.abs(np.array([one["score"] for one in answer["data"]]) - expected).max() < 1e-5
    body = {"query": QUERY, "documents": [DOCUMENTS[0], *({"text": one} for one in DOCUMENTS[1:])]}
    ranked = scorer.http.post("/v1/rerank", json=body).json()
    assert [one["index"] for one in ranked["results"]] == np.argsort(-expected).tolist()
    assert ranked["results"][0]["document"] == {"text": DOCUMENTS[int(expected.argmax())]}
    assert ranked["usage"]["total_tokens"] == answer["usage"]["total_tokens"]
    best_only = body | {"top_n": 2, "return_documents": False}
    best = scorer.http.post("/v1/rerank", json=best_only).json()
    assert [set(one) for one in best["results"]] == [{"index", "relevance_score"}] * 2
    for option, message in ({"top_n": 0}, "top_n"), ({"documents": []}, "documents is empty"):
        found = error(scorer.http.post("/v1/rerank", json=body | option))
        assert message in found["message"]
    assert scorer.http.get("/v1/models").json()["data"][0]["tasks"] == ["score"]


@pytest.mark.parametrize("problem", ["single", "multi"])
def test_classifier_equals_transformers(problem, tmp_path):
    import torch

    from tests.pooling.folders import bert, bert_tokenizer, save

    labels = {0: "calm", 1: "wild", 2: "flat"}
    model = bert("BertForSequenceClassification", id2label=labels)
    model.config.problem_type = f"{problem}_label_classification"
    tokenizer = bert_tokenizer()
    served = LocalServer(str(save(model, tokenizer, tmp_path / "classifier")), cwd=tmp_path)
    try:
        answer = served.http.post("/classify", json={"input": DOCUMENTS}).json()
        pooled = served.http.post("/pooling", json={"input": DOCUMENTS}).json()
        refused = error(served.http.post("/v1/embeddings", json={"input": "x"}))["message"]
        assert "This model classifies texts" in refused
        assert served.http.get("/v1/models").json()["data"][0]["tasks"] == ["classify"]
    finally:
        served.stop()
    for document, one in zip(DOCUMENTS, answer["data"], strict=True):
        with torch.no_grad():
            logits = model(**tokenizer(document, return_tensors="pt")).logits[0]
        expected = logits.softmax(-1) if problem == "single" else logits.sigmoid()
        assert one["probs"] == pytest.approx(expected.tolist(), abs=1e-5)
        assert (one["label"], one["num_classes"]) == (labels[int(logits.argmax())], 3)
    probs = [one["probs"] for one in answer["data"]]
    assert np.allclose([one["data"] for one in pooled["data"]], probs, atol=1e-5)


def rounded(one: dict) -> dict:
    """An item of a reply. Batches differ in the last digits."""
    return {key: round(value, 5) if type(value) is float else value for key, value in one.items()}


def test_cross_encoder_also_classifies_and_has_other_paths(scorer):
    answer = scorer.http.post("/classify", json={"input": DOCUMENTS[0]}).json()
    [one] = answer["data"]
    assert (one["label"], one["num_classes"]) == ("LABEL_0", 1)
    ranking = {"query": QUERY, "documents": DOCUMENTS}
    scoring = {"text_1": QUERY, "text_2": DOCUMENTS}
    pooled = {"input": DOCUMENTS[0]}
    for path, others, body, key in (
        ("/v1/rerank", ("/rerank", "/v2/rerank", "/invocations"), ranking, "results"),
        ("/v1/score", ("/score", "/invocations"), scoring, "data"),
        ("/classify", ("/invocations",), pooled, "data"),
    ):
        expected = scorer.http.post(path, json=body).json()[key]
        for other in others:
            found = scorer.http.post(other, json=body).json()[key]
            assert [rounded(one) for one in found] == [rounded(one) for one in expected]


def test_cross_encoder_refuses_embeddings_and_long_pairs(scorer):
    assert "/v1/rerank" in error(scorer.http.post("/v1/embeddings", json={"input": "x"}))["message"]
    body = {"query": "short", "documents": ["short", "long " * 70]}
    found = error(scorer.http.post("/v1/rerank", json=body))
    assert found["param"] == "documents"
    assert "your documents[1] resulted in" in found["message"]
    assert "74 tokens" in found["message"]
    truncated = scorer.http.post("/v1/rerank", json=body | {"truncate_prompt_tokens": -1})
    assert truncated.status_code == 200


def test_decoder_embeds_and_generates(decoder):
    assert decoder.http.get("/v1/models").json()["data"][0]["tasks"] == [
        "generate",
        "embed",
        "chat",
    ]
    body = {"input": "The sea"}
    [vector] = vectors(decoder.http.post("/v1/embeddings", json=body))
    [cut] = vectors(decoder.http.post("/v1/embeddings", json=body | {"dimensions": 4}))
    assert np.allclose(cut, vector[:4] / np.linalg.norm(vector[:4]), atol=1e-6)
    before = decoder.metric("tk:prompt_tokens_total")
    decoder.http.post("/v1/embeddings", json={"input": ["The sea", "A cat"]})
    assert decoder.metric("tk:prompt_tokens_total") == before + 12
    text = decoder.http.post("/v1/completions", json={"prompt": "The sea", "max_tokens": 4}).json()
    assert text["usage"]["completion_tokens"] == 4


def test_llama_cpp_s_embeddings_are_the_same(decoder):
    texts = ["The sea is calm.", "A storm is coming."]
    expected = vectors(decoder.http.post("/v1/embeddings", json={"input": texts}))
    for path in ("/embedding", "/embeddings"):
        found = decoder.http.post(path, json={"content": texts}).json()
        assert [one["index"] for one in found] == [0, 1]
        for one, vector in zip(found, expected, strict=True):
            np.testing.assert_allclose(one["embedding"], [vector], rtol=1e-6)
    for wrong in ({"content": []}, {"content": "x", "embd_normalize": -1}):
        assert "must be" in error(decoder.http.post("/embedding", json=wrong))["message"]


def test_conversation_is_embedded(decoder):
    body = {"messages": [{"role": "user", "content": "The sea"}]}
    tokens = decoder.http.post("/tokenize", json=body | {"add_generation_prompt": False}).json()
    [expected] = vectors(decoder.http.post("/v1/embeddings", json={"input": tokens["tokens"]}))
    [found] = vectors(decoder.http.post("/v1/embeddings", json=body))
    assert np.array_equal(found, expected)
    pooled = decoder.http.post("/pooling", json=body | {"encoding_format": "base64"}).json()
    data = np.frombuffer(base64.b64decode(pooled["data"][0]["data"]), "<f4")
    assert np.array_equal(data, expected.astype(np.float32))
    for wrong in ({}, body | {"input": "x"}):
        assert error(decoder.http.post("/v1/embeddings", json=wrong))["param"] == "input"
    assert "no labels" in error(decoder.http.post("/classify", json={"input": "x"}))["message"]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "chat.completion"),
        ({"prompt": "x"}, "text_completion"),
        ({"input": "x"}, "list"),
    ],
)
def test_invocations_answers_by_the_fields(decoder, body, kind):
    more = {} if "input" in body else {"max_tokens": 1}
    assert decoder.http.post("/invocations", json=body | more).json()["object"] == kind


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "needs messages, prompt"),
        ({"prompt": "x", "max_tokens": "x"}, "max_tokens must be an integer; got"),
        ({"input": "x", "model": "other"}, "not served"),
    ],
)
def test_invocations_that_are_not_valid_are_refused(decoder, body, words):
    assert words in decoder.http.post("/invocations", json=body).json()["error"]["message"]


def test_generating_model_explains_how_to_embed(server):
    for path, body in (
        ("embeddings", {"input": "x"}),
        ("score", {"text_1": "x", "text_2": "y"}),
        ("rerank", {"query": "x", "documents": ["y"]}),
    ):
        assert "--pooling last" in error(server.http.post(f"/v1/{path}", json=body))["message"]
    assert server.http.get("/v1/models").json()["data"][0]["tasks"] == ["generate", "chat"]


def test_many_inputs_run_in_turns_with_other_requests(decoder):
    inputs = [[(i + j) % 250 for j in range(60)] for i in range(300)]
    answers: list[httpx.Response] = []

    def post() -> None:
        answers.append(
            httpx.post(f"{decoder.url}/v1/embeddings", json={"input": inputs}, timeout=4 * WAIT)
        )

    def num_steps() -> float:
        return decoder.metric("tk:iteration_tokens_total_count")

    first_step = num_steps()
    thread = threading.Thread(target=post)
    waits, most = [], 0.0
    with decoder.slowly():
        thread.start()
        until(lambda: decoder.metric("tk:num_requests_running") > 0)
        for _ in range(6):
            before = num_steps()
            decoder.http.post("/v1/embeddings", json={"input": "The sea"})
            waits.append(num_steps() - before)
            running = decoder.metric("tk:num_requests_running")
            most = max(most, running + decoder.metric("tk:num_requests_waiting"))
        assert thread.is_alive()
    thread.join()
    found = vectors(answers[0])
    assert len(found) == 300
    [alone] = vectors(decoder.http.post("/v1/embeddings", json={"input": inputs[0]}))
    assert (found[0] == alone).all()
    assert np.median(waits) < (num_steps() - first_step) / 8
    assert most <= 5  # two steps of 128 tokens, and the other request


def test_disconnect_ends_the_inputs(decoder):
    inputs = [[i % 250] * 100 for i in range(2048)]
    impatient = httpx.Timeout(WAIT, read=0.3)
    with decoder.slowly():
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{decoder.url}/v1/embeddings", json={"input": inputs}, timeout=impatient)
        before = decoder.metric("tk:prompt_tokens_total")
        until(decoder.is_idle)
    assert decoder.metric("tk:prompt_tokens_total") == before


def test_remaining_inputs_survive_an_engine_restart(
    decoder: Server, start: Callable[..., Server], decoder_folder: Path
) -> None:
    server = start(*SMALL_STEPS, model=decoder_folder)
    inputs = [[(i + j) % 250 for j in range(100)] for i in range(60)]
    answers: list[httpx.Response] = []

    def post() -> None:
        answers.append(
            httpx.post(f"{server.url}/v1/embeddings", json={"input": inputs}, timeout=4 * WAIT)
        )

    thread = threading.Thread(target=post)
    with server.slowly():
        thread.start()
        until(lambda: server.metric("tk:num_requests_running") > 0)
        server.core.kill()
    thread.join()
    found = vectors(answers[0])
    assert len(found) == len(inputs)
    for i in (0, 30, 59):
        alone = vectors(decoder.http.post("/v1/embeddings", json={"input": inputs[i]}))[0]
        assert np.allclose(found[i], alone, atol=1e-6)
