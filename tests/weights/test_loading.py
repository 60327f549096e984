"""Valid and broken checkpoints in many variants. The reference is Transformers."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import checkpoints
from tests.checkpoints import VOCAB, edit_json
from toolkit import LLM, SamplingParams
from toolkit.errors import CheckpointError, ConfigError, ModelNotFoundError, OutOfMemoryError

PROMPT = random.Random(0).choices(range(VOCAB), k=12)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def answer(folder: Path, **settings: object) -> list[int]:
    llm = LLM(str(folder), device="cpu", max_num_seqs=2, **settings)
    return (
        llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    )


@pytest.fixture
def llama(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a copy of a checkpoint, to be changed."""
    return Path(shutil.copytree(checkpoint("llama3-gqa"), tmp_path / "llama"))


@pytest.fixture(scope="module")
def llama_answer() -> list[int]:
    return checkpoints.greedy(checkpoints.make_reference("llama3-gqa"), PROMPT, 16)


@pytest.fixture(scope="module")
def gpt2_answer() -> list[int]:
    return checkpoints.greedy(checkpoints.make_reference("gpt2"), PROMPT, 16)


def gpt2_tensors() -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in checkpoints.make_reference("gpt2").state_dict().items()}


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a checkpoint with one file."""
    tensors = load_file(weights(folder))
    change(tensors)
    save_file(tensors, weights(folder))


class TestValid:
    def test_shards_equal_one_file(self, tmp_path, llama_answer):
        model = checkpoints.make_reference("llama3-gqa")
        folder = checkpoints.save(model, tmp_path / "shards", max_shard_size="20KB")
        assert len(list(folder.glob("model-*-of-*.safetensors"))) > 4
        assert not weights(folder).exists()
        assert answer(folder) == llama_answer

    def test_hundreds_of_shards(self, llama, llama_answer):
        tensors = load_file(weights(llama))
        shards = {name: f"model-{i:05}.safetensors" for i, name in enumerate(tensors)}
        for name, file in shards.items():
            save_file({name: tensors[name]}, llama / file)
        for i in range(300):  # an index may list files with only old buffers
            file = f"model-x{i:05}.safetensors"
            name = f"model.layers.{i}.self_attn.rotary_emb.inv_freq"
            save_file({name: torch.zeros(2)}, llama / file)
            shards[name] = file
        weights(llama).unlink()
        (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        assert answer(llama) == llama_answer

    @pytest.mark.parametrize("prefix", [True, False])
    @pytest.mark.parametrize("head", [True, False])
    def test_gpt2_with_and_without_prefix_and_head(
        self, checkpoint, tmp_path, prefix, head, gpt2_answer
    ):
        """The original files have neither prefix nor head, but include mask buffers."""
        folder = Path(shutil.copytree(checkpoint("gpt2"), tmp_path / "gpt2"))
        tensors = {
            (
                name if prefix or name == "lm_head.weight" else name.removeprefix("transformer.")
            ): tensor
            for name, tensor in gpt2_tensors().items()
        }
        if not head:
            del tensors["lm_head.weight"]
        base = "transformer." if prefix else ""
        tensors[f"{base}h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
        tensors[f"{base}h.0.attn.masked_bias"] = torch.tensor(-1e4)
        save_file({name: t.contiguous().clone() for name, t in tensors.items()}, weights(folder))
        assert answer(folder) == gpt2_answer

    @pytest.mark.parametrize("head", ["embed_out", "lm_head"])
    @pytest.mark.parametrize("name", ["gpt-neox", "gpt-neox-sequential"])
    def test_gpt_neox_with_old_buffers_and_a_head(self, checkpoint, tmp_path, name, head):
        """The second is tied. Without the base model's prefix."""
        folder = Path(shutil.copytree(checkpoint(name), tmp_path / "neox"))
        model = checkpoints.make_reference(name)
        tensors = {key.removeprefix("gpt_neox."): t for key, t in model.state_dict().items()}
        tensors[f"{head}.weight"] = tensors.pop("lm_head.weight").clone()
        tensors["layers.0.attention.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
        tensors["layers.0.attention.masked_bias"] = torch.tensor(-1e9)
        tensors["layers.0.attention.rotary_emb.inv_freq"] = torch.ones(4)
        save_file(tensors, weights(folder))
        assert answer(folder) == checkpoints.greedy(model, PROMPT, 16)

    @pytest.mark.parametrize("name", ["phi", "gpt-neox"])
    def test_base_model_without_head(self, checkpoint, tmp_path, name):
        folder = Path(shutil.copytree(checkpoint(name), tmp_path / "base"))
        model = checkpoints.make_reference(name).base_model
        model.save_pretrained(folder)
        llm = LLM(str(folder), device="cpu", max_num_seqs=2, pooling="last")
        [result] = llm.embed([PROMPT])
        with torch.no_grad():
            last = model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(last, dim=0)
        torch.testing.assert_close(torch.tensor(result.outputs.embedding), expected)

    @pytest.mark.parametrize("zipped", [True, False])
    def test_pytorch_files_of_both_formats(self, checkpoint, tmp_path, zipped, gpt2_answer):
        """Files from before PyTorch 1.6 are not zip archives."""
        folder = Path(shutil.copytree(checkpoint("gpt2"), tmp_path / "gpt2"))
        weights(folder).unlink()
        torch.save(
            gpt2_tensors(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped
        )
        assert answer(folder) == gpt2_answer
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
            answer(folder, load_format="safetensors")

    def test_sharded_pytorch_files(self, checkpoint, tmp_path, gpt2_answer):
        folder = Path(shutil.copytree(checkpoint("gpt2"), tmp_path / "gpt2"))
        weights(folder).unlink()
        tensors = list(gpt2_tensors().items())
        parts = [dict(tensors[:9]), dict(tensors[9:])]
        names = {}
        for i, part in enumerate(parts):
            torch.save(part, folder / f"pytorch_model-{i}.bin")
            names |= dict.fromkeys(part, f"pytorch_model-{i}.bin")
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
        assert answer(folder) == gpt2_answer

    def test_safetensors_are_preferred(self, checkpoint, tmp_path, gpt2_answer):
        folder = Path(shutil.copytree(checkpoint("gpt2"), tmp_path / "gpt2"))
        (folder / "pytorch_model.bin").write_bytes(b"garbage")
        assert answer(folder) == gpt2_answer

    def test_other_safetensors_files_are_ignored(self, llama, llama_answer):
        """Mistral's folders have the weights twice, once under Mistral's own names."""
        save_file({"tok_embeddings.weight": torch.zeros(3)}, llama / "consolidated.safetensors")
        assert answer(llama) == llama_answer

    @pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16])
    def test_16_bit_checkpoints_run_in_float32_on_a_cpu(self, tmp_path, saved):
        model = checkpoints.make_reference("llama3-gqa").to(saved)
        folder = checkpoints.save(model, tmp_path / "half")
        assert json.loads((folder / "config.json").read_text())["dtype"] == str(saved).removeprefix(
            "torch."
        )
        assert answer(folder) == checkpoints.greedy(model.float(), PROMPT, 16)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_dtype_setting_is_used(self, llama, dtype):
        llm = LLM(str(llama), device="cpu", dtype=dtype, max_num_seqs=2)
        assert llm.info.dtype == dtype
        assert llm.info.weight_bytes == llm.info.num_parameters * (4 if dtype == "float32" else 2)
        out = llm.generate(
            {"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=1, temperature=0, logprobs=0)
        )
        reference = checkpoints.make_reference("llama3-gqa")
        expected = checkpoints.logits(reference, PROMPT)[-1].log_softmax(-1)
        position = out[0].outputs[0].logprobs[0]
        ((token, value),) = position.items()
        assert value.logprob == pytest.approx(
            float(expected[token]), abs=1e-3 if dtype == "float32" else 0.5
        )

    def test_number_of_parameters_equals_transformers(self, llama):
        llm = LLM(str(llama), device="cpu", max_num_seqs=2)
        assert llm.info.num_parameters == checkpoints.make_reference("llama3-gqa").num_parameters()

    def test_dummy_weights_need_no_files_and_depend_on_the_seed(self, llama):
        weights(llama).unlink()
        first, again = answer(llama, load_format="dummy"), answer(llama, load_format="dummy")
        assert first == again
        assert answer(llama, load_format="dummy", seed=1) != first


class TestBroken:
    """Each error names the file and the problem."""

    def fails(
        self, folder: Path, *words: str, kind: type = CheckpointError, **settings: object
    ) -> str:
        with pytest.raises(kind) as caught:
            answer(folder, **settings)
        message = caught.value.message
        for word in words:
            assert word in message, message
        assert "\n" not in message
        return message

    def test_missing_shard(self, tmp_path):
        folder = checkpoints.save(
            checkpoints.make_reference("llama3-gqa"), tmp_path / "m", max_shard_size="20KB"
        )
        shard = sorted(folder.glob("model-*.safetensors"))[1]
        shard.unlink()
        self.fails(folder, str(folder), shard.name, "lacks 1 of the")

    def test_truncated_file(self, llama):
        size = weights(llama).stat().st_size
        with weights(llama).open("r+b") as file:
            file.truncate(size - 1000)
        self.fails(llama, str(weights(llama)), "cut short", f"{size - 1000} bytes of {size}")

    def test_truncated_header(self, llama):
        with weights(llama).open("r+b") as file:
            file.truncate(100)
        self.fails(llama, str(weights(llama)), "cut short", "100 bytes")

    @pytest.mark.parametrize(
        "content",
        [b"", b"\x00", b"garbage that is longer than eight bytes", struct.pack("<Q", 4) + b"nope"],
    )
    def test_garbage(self, llama, content):
        weights(llama).write_bytes(content)
        self.fails(llama, str(weights(llama)), "safetensors")

    def test_git_lfs_pointer(self, llama):
        """A failed download often leaves a Git LFS pointer."""
        weights(llama).write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123456\n"
        )
        self.fails(llama, str(weights(llama)))

    def test_wrong_shape(self, llama):
        rewrite(llama, lambda t: t.update({"model.norm.weight": torch.ones(31)}))
        self.fails(llama, str(weights(llama)), "model.norm.weight", "[31]", "[32]")

    def test_missing_tensor(self, llama):
        rewrite(llama, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
        self.fails(llama, str(llama), "model.layers.1.mlp.up_proj.weight", "lacks 1 of")

    def test_missing_head_of_an_untied_model(self, llama):
        rewrite(llama, lambda t: t.pop("lm_head.weight"))
        self.fails(llama, "lm_head.weight")

    def test_head_with_a_bias_that_the_model_lacks(self, llama):
        edit_json(llama / "config.json", tie_word_embeddings=True)
        rewrite(llama, lambda t: t.update({"lm_head.bias": torch.ones(5)}))
        self.fails(llama, "lm_head.bias", "does not have")

    def test_unknown_tensor(self, llama):
        rewrite(llama, lambda t: t.update({"model.layers.0.self_attn.q_proj.scale": torch.ones(3)}))
        self.fails(
            llama, str(weights(llama)), "model.layers.0.self_attn.q_proj.scale", "does not have"
        )

    @pytest.mark.parametrize(
        "index",
        [
            "{",
            "[]",
            "{}",
            '{"weight_map": []}',
            '{"weight_map": {"a": 3}}',
            '{"weight_map": {"a": ["x"]}}',
        ],
    )
    def test_broken_index(self, llama, index):
        (llama / "model.safetensors.index.json").write_text(index)
        self.fails(llama, "model.safetensors.index.json", "cannot be read")

    @pytest.mark.parametrize(
        "name", ["../outside.safetensors", "/etc/passwd", "sub/dir.safetensors"]
    )
    def test_index_that_points_outside(self, llama, name):
        shutil.copy(weights(llama), llama.parent / "outside.safetensors")
        (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        self.fails(llama, "model.safetensors.index.json", name, "outside its folder")

    def test_no_weights(self, llama):
        weights(llama).unlink()
        self.fails(llama, str(llama), "no weights")

    def test_pickle_with_code_is_refused_and_not_run(self, checkpoint, tmp_path):
        folder = Path(shutil.copytree(checkpoint("gpt2"), tmp_path / "gpt2"))
        weights(folder).unlink()
        trace = tmp_path / "the code ran"

        class Evil:
            def __reduce__(self) -> tuple:
                return open, (str(trace), "w")

        for save in (torch.save, lambda what, file: file.write_bytes(pickle.dumps(what))):
            save(gpt2_tensors() | {"evil": Evil()}, folder / "pytorch_model.bin")
            self.fails(folder, "pytorch_model.bin", "code, which tk does not run")
            assert not trace.exists()

    @pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, {"model": {"a": torch.ones(2)}}])
    def test_pickle_without_tensors(self, checkpoint, tmp_path, content):
        folder = Path(shutil.copytree(checkpoint("gpt2"), tmp_path / "gpt2"))
        weights(folder).unlink()
        torch.save(content, folder / "pytorch_model.bin")
        self.fails(folder, "pytorch_model.bin", "not a dictionary of tensors")

    @pytest.mark.parametrize("size", [0, 10, 5000])
    def test_truncated_pickle(self, checkpoint, tmp_path, size):
        folder = Path(shutil.copytree(checkpoint("gpt2"), tmp_path / "gpt2"))
        weights(folder).unlink()
        file = folder / "pytorch_model.bin"
        torch.save(gpt2_tensors(), file)
        with file.open("r+b") as stream:
            stream.truncate(size)
        self.fails(folder, "pytorch_model.bin", "cut short")

    def test_unsupported_architecture_lists_the_supported(self, llama):
        edit_json(llama / "config.json", architectures=["T5ForConditionalGeneration"])
        self.fails(
            llama, str(llama), "T5ForConditionalGeneration", "GPT2LMHeadModel", "Qwen3ForCausalLM"
        )

    def test_missing_architecture_names_the_model_type(self, llama):
        edit_json(llama / "config.json", architectures=None)
        self.fails(llama, "'llama'", "GPT2LMHeadModel")

    @pytest.mark.parametrize("content", ["", "{", "[]", "null", "\x00\xff"])
    def test_unreadable_config(self, llama, content):
        (llama / "config.json").write_bytes(content.encode("latin-1"))
        self.fails(llama, str(llama / "config.json"), "cannot be read")

    def test_config_with_wrong_types(self, llama):
        edit_json(llama / "config.json", hidden_size="many")
        self.fails(llama, str(llama / "config.json"), "cannot be used")

    def test_unsupported_rope(self, llama):
        edit_json(llama / "config.json", rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})
        self.fails(llama, "spiral")

    def test_unsupported_activation(self, llama):
        edit_json(llama / "config.json", hidden_act="snake")
        self.fails(llama, "snake", "silu", "gelu_new")

    def test_context_longer_than_the_models(self, llama):
        self.fails(llama, "--max-model-len is 161", "160", kind=ConfigError, max_model_len=161)

    def test_cache_too_small_for_one_request(self, llama):
        message = self.fails(
            llama,
            "--max-model-len 64",
            kind=OutOfMemoryError,
            max_model_len=100,
            num_gpu_blocks_override=4,
        )
        assert "64 tokens" in message

    def test_folder_without_a_model(self, tmp_path):
        (tmp_path / "photos").mkdir()
        (tmp_path / "photos" / "cat.jpg").touch()
        self.fails(tmp_path / "photos", str(tmp_path / "photos"), "no config.json", "cat.jpg")

    def test_file_instead_of_a_folder(self, llama):
        self.fails(weights(llama), "is a file")

    def test_missing_path_suggests_its_neighbours(self, llama):
        self.fails(
            llama.parent / "lama",
            "There is no folder",
            "Did you mean llama",
            kind=ModelNotFoundError,
        )

    def test_offline_error_names_the_searched_places(self, llama, monkeypatch):
        monkeypatch.chdir(llama.parent)
        with pytest.raises(ModelNotFoundError) as caught:
            LLM("lama", device="cpu")
        message = caught.value.message
        for word in (
            str(llama.parent),
            "not in the cache",
            "HF_HUB_OFFLINE is set",
            "Did you mean llama",
        ):
            assert word in message, message

    def test_unreadable_tokenizer(self, llama):
        (llama / "tokenizer.json").write_text("{")
        self.fails(llama, "tokenizer", str(llama))
