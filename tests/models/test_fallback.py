"""Models through Transformers: combinations with the engine's features, and refusals.

`test_every_decoder` compares architectures with Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests import checkpoints, engines
from tests.checkpoints import generate
from tests.models.conftest import Case
from tests.models.decoders import make_decoder
from toolkit import LLM, SamplingParams, StructuredOutputsParams
from toolkit.errors import CheckpointError, ConfigError, ToolkitError

pytestmark = pytest.mark.usefixtures("forked_processes")

FALLBACK = {"device": "cpu", "model_impl": "transformers", "max_model_len": 160}
OWN = (
    "gemma3",
    "gpt2",
    "llama-rope-dynamic",
    "opt",
    "phi4-long-context",
    "qwen2-tied-some-windows",
)
"""Two rotations and windows; transposed weights; two rotations that depend on the length; layers
inside of layers; a tied head."""


@pytest.fixture(scope="module", params=OWN)
def own(request, checkpoint) -> Case:
    return Case(request.param, checkpoint(request.param))


def decoder(model_type: str, folder: Path) -> Case:
    model = make_decoder(model_type)
    checkpoints.save(model, folder)
    return Case(model_type, folder, model)


def test_architectures_of_tk_run_through_transformers_too(own):
    llm = own.engine(**FALLBACK)
    for prompt in own.prompts:
        ours, expected = checkpoints.engine_logits(llm, prompt), own.logits(prompt)
        assert (ours - expected).norm() / expected.norm() < 1e-4
    own.assert_greedy(generate(llm, own.prompts))


def test_answers_are_those_of_tks_own_code(checkpoint):
    """Seeds, penalties, grammars and log-probabilities, for several prompts at once."""
    params = [
        SamplingParams(temperature=0.9, seed=1, max_tokens=16, ignore_eos=True, n=2),
        SamplingParams(temperature=0.8, seed=2, top_p=0.8, max_tokens=16, logprobs=2),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=16),
        SamplingParams(
            seed=3, max_tokens=16, structured_outputs=StructuredOutputsParams(regex="[a-c]+d")
        ),
    ]
    prompts = [{"prompt_token_ids": list(range(3, 30 + i))} for i in range(len(params))]
    texts, chances = [], []
    for implementation in ("toolkit", "transformers"):
        llm = LLM(
            str(checkpoint("llama3-gqa")),
            **FALLBACK | {"model_impl": implementation},
            max_num_batched_tokens=24,
        )
        results = llm.generate(prompts, params, use_tqdm=False)
        texts.append([[o.token_ids for o in result.outputs] for result in results])
        chances.append(
            [one.logprob for at in results[1].outputs[0].logprobs for one in at.values()]
        )
    assert texts[0] == texts[1]
    assert chances[0] == pytest.approx(chances[1], abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"quantization": "int8"}, 0.1),
        ({"kv_cache_dtype": "fp8"}, 0.1),
        ({"dtype": "bfloat16"}, 0.1),
    ],
    ids=str,
)
def test_rounded_weights_and_caches_stay_close(tmp_path, settings, most):
    case = decoder("cwm", tmp_path)
    llm = case.engine(**FALLBACK | {"dtype": "float32"} | settings)
    prompt = case.prompts[3]
    ours, expected = checkpoints.engine_logits(llm, prompt).float(), case.logits(prompt)
    assert 1e-5 < (ours - expected).norm() / expected.norm() < 0.1


def test_two_ranks_compute_what_one_does(tmp_path):
    case = decoder("cwm", tmp_path)
    llm = case.engine(
        **FALLBACK, dtype="float32", tensor_parallel_size=2, num_threads=1, kv_cache_memory=0.02
    )
    case.assert_greedy(generate(llm, case.prompts[2:4], max_tokens=20), num_tokens=20)
    assert llm.info.num_parameters < llm.info.model_parameters
    llm.shutdown()


@pytest.mark.parametrize(
    ("model_type", "settings", "says"),
    [
        ("cwm", {"pipeline_parallel_size": 2}, "have one stage only"),
        ("persimmon", {"tensor_parallel_size": 2}, "no plan for splitting"),
        ("cwm", {"tensor_parallel_size": 3}, "num_attention_heads is 4"),
        ("cwm", {"model_impl": "toolkit"}, "unsupported architecture 'CwmForCausalLM'"),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused(tmp_path, model_type, settings, says):
    case = decoder(model_type, tmp_path)
    with pytest.raises(ToolkitError, match=says):
        case.engine(**FALLBACK | settings)


def test_float16_is_refused_for_models_that_exceed_its_range(checkpoint):
    with pytest.raises(ConfigError, match="Gemma3ForCausalLM exceed its range"):
        LLM(str(checkpoint("gemma3")), **FALLBACK, dtype="float16")


def test_incomplete_experts_are_named(tmp_path):
    """Several tensors of the file make one parameter."""
    from safetensors.torch import load_file, save_file

    case = decoder("olmoe", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj"):
        case.engine(**FALLBACK)


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OtherConfig(LlamaConfig):
    model_type = "other"

class OtherForCausalLM(LlamaForCausalLM):
    config_class = OtherConfig
"""


def test_code_of_a_checkpoint_runs_only_if_it_is_trusted(tmp_path, caplog):
    model = checkpoints.make_reference("llama3-gqa")
    checkpoints.save(model, tmp_path)
    (tmp_path / "other.py").write_text(REMOTE)
    names = {"AutoConfig": "other.OtherConfig", "AutoModelForCausalLM": "other.OtherForCausalLM"}
    checkpoints.edit_json(
        tmp_path / "config.json",
        model_type="other",
        architectures=["OtherForCausalLM"],
        auto_map=names,
    )
    with pytest.raises(CheckpointError, match="--trust-remote-code runs"):
        LLM(str(tmp_path), device="cpu")
    case = Case("llama3-gqa", tmp_path, model)
    llm = case.engine(device="cpu", trust_remote_code=True)
    assert caplog.text.count("has all rights of this process") == 1
    case.assert_greedy(generate(llm, case.prompts[:2]))
    elsewhere = {name: f"org/other--{value}" for name, value in names.items()}
    checkpoints.edit_json(tmp_path / "config.json", auto_map=elsewhere)
    with pytest.raises(CheckpointError, match="code of another repository"):
        LLM(str(tmp_path), device="cpu", trust_remote_code=True)


def test_norms_are_replaced_only_if_they_agree():
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from toolkit.models.fallback.swap import FlatNorm, swap_norms

    class Half(LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.5 * super().forward(x)

    model = nn.ModuleDict(
        {
            "llama": LlamaRMSNorm(16, 0.01),
            "gemma": GemmaRMSNorm(16, 0.01),
            "layer": nn.LayerNorm(16, 0.01),
            "other": Half(16, 0.01),
        }
    )
    swap_norms(model, torch.float32, torch.device("cpu"))
    offsets = {n: m.norm.offset for n, m in model.items() if isinstance(m, FlatNorm)}
    assert offsets == {"llama": 0.0, "gemma": 1.0, "layer": 0.0}


def test_unknown_length_must_be_given(tmp_path):
    case = decoder("cwm", tmp_path)
    checkpoints.edit_json(tmp_path / "config.json", max_position_embeddings=None)
    with pytest.raises(ConfigError, match="Give --max-model-len"):
        LLM(str(case.folder), device="cpu")


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ["apertus", "deepseek_v3", "hunyuan_v1_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoders_run_on_a_gpu(tmp_path, model_type, dtype):
    """With graphs, unless the model's code waits for the GPU: experts in fp32."""
    from tests.models.test_parity_gpu import SIZES, Noise

    case = decoder(model_type, tmp_path)
    llm = case.engine(device="cuda", dtype=dtype, max_model_len=160, **SIZES)
    has_graphs = bool(engines.graphs(llm))
    assert has_graphs == (dtype == "bfloat16" or model_type == "apertus")
    noise = Noise(case).tolerance(dtype)
    case.assert_greedy(generate(llm, case.prompts), noise)
    [again] = generate(llm, case.prompts[-1:])
    assert again.num_cached_tokens == 80
    case.assert_greedy([again], noise)
    llm.shutdown()
