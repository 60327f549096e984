"""The tables of kernels are complete, and only they import those of GPUs."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from types import FunctionType

import pytest
import torch

from toolkit.kernels import table
from toolkit.kernels.switch import only_pytorch
from toolkit.kernels.table import (
    CPUKernels,
    Kernels,
    TritonKernels,
    gpu_kernels,
    kernels_for,
    triton_kernels_for,
)

TOOLKIT = Path(__file__).parents[2] / "toolkit"
TABLE = TOOLKIT.parent / "kernels" / "table.py"
IMPORTS_ALLOWED = {"doctor/probe.py"}
"""Modules that may import a Triton kernel: the probe compiles one in a new process."""

CONTRACTS = {
    "product": "products/test_products.py::test_product_equals_the_reference",
    "product_add_norm": "products/test_linear.py::test_norms_between_products",
    "fp8_product": "products/test_fp8.py::test_products_of_any_size_and_dtype",
    "rounded_fp8_product": "products/test_products.py::"
    "test_results_for_another_product_are_rounded",
    "fp8_block_product": "products/test_fp8_blocks.py::test_product_of_rounded_rows_is_exact",
    "grouped_product": "products/test_grouped.py::test_product_equals_that_with_the_dense_weight",
    "grouped_add_norm": "products/test_epilogue.py::test_formats_share_every_end",
    "add_delta": "products/test_lora.py::test_add_delta_ends_any_product",
    "add_rows": "products/test_lora.py::test_rows_of_a_table_get_what_their_adapters_add",
    "arrange_groups": "products/test_grouped.py::test_expanded_weight_is_exact",
    "expand_groups": "products/test_grouped.py::test_expanded_weight_is_exact",
    "route": "experts/test_routing.py::test_experts_and_weights",
    "layer_of_experts": "experts/test_experts.py::test_sizes_and_types",
    "join": "test_norm.py::test_triton_equals_reference",
    "rms_norm_rows": "test_norm.py::test_rows_are_normed_in_place",
    "gate_rows": "test_activation.py::test_gates_multiply_rows",
    "multiply_rows": "test_activation.py::test_gates_multiply_rows",
    "add_gated": "test_activation.py::test_gated_rows_are_added",
    "soft_cap_": "test_activation.py::test_logits_are_capped_in_place",
    "embed_shard": "test_embedding.py::test_rows_of_other_shards_are_zeros",
    "place_rows": "test_embedding.py::test_place_rows_equals_reference",
    "rotate_": "attention/test_windows.py::test_rotation_equals_reference",
    "attend_short": "attention/test_windows.py::test_short_attention_equals_reference",
    "qk_norm_rope_write": "attention/test_rotary.py::test_every_transform_of_every_head_size",
    "paged_attention": "attention/test_attention.py::test_windows_caps_and_sinks",
    "decode_attention": "attention/test_decode_attention.py::test_a_token_and_its_drafts",
    "penalize": "sampling/test_sampling.py::test_penalties_equal_reference",
    "penalize_in_graph": "sampling/test_sampling.py::test_penalties_equal_reference",
    "mask_logits": "sampling/test_bitmask.py::test_triton_equals_reference",
    "speech_rules": "sampling/test_speech.py::test_triton_equals_reference",
    "sample": "sampling/test_sampling.py::test_rows_with_and_without_filters",
    "gather_logits": "sampling/test_sampling.py::"
    "test_rows_of_logits_are_gathered_and_their_tokens_scattered",
    "scatter": "sampling/test_sampling.py::"
    "test_rows_of_logits_are_gathered_and_their_tokens_scattered",
    "logprobs": "sampling/test_sampling.py::test_logprobs_equal_reference",
    "delta_net": "test_recurrent_layers.py::test_kernels_compute_a_delta_net",
    "gated_convolution": "test_recurrent_layers.py::test_kernels_compute_a_gated_convolution",
    "copy_runs": "test_inputs.py::test_copy_runs_equals_reference",
    "expand_inputs": "test_inputs.py::test_expand_inputs_equals_reference",
    "locate_points": "sampling/test_drafts.py::test_kernels_equal_reference",
    "accept_drafts": "sampling/test_drafts.py::test_kernels_equal_reference",
    "look_up_drafts": "sampling/test_drafts.py::test_kernels_equal_reference",
    "draft_inputs": "sampling/test_drafts.py::test_inputs_before_drafts_equal_reference",
}
"""The test that compares a computing entry with its reference, also without a GPU."""
ON_SEVERAL_GPUS = {"peer_buffer_bytes", "make_peers", "release_peers", "sums", "all_gather"}
"""Entries that read other GPUs' memory: `tests/distributed/test_symmetric.py`."""
NOT_COMPUTING = {
    *("fuses_norm", "fuses_grouped_norm", "factors", "empty_groups", "choosing_products"),
    *("rank_block", "row_classes", "more_row_classes", "min_choice_tokens", "max_short_segment"),
    *("compiled_side_by_side", "_late_compilations", "recurrent_step", "reads_rounded"),
}


@pytest.fixture
def kernels() -> TritonKernels:
    pytest.importorskip("triton")
    return TritonKernels()


def test_every_member_is_callable_or_a_limit(kernels):
    members = dict(vars(kernels))
    linear = kernels.product_add_norm.__globals__["linear"]
    assert members.pop("row_classes")[-1] == linear.MAX_TOKENS
    assert members.pop("more_row_classes")[0] > vars(kernels)["row_classes"][-1]
    limits = {name for name in members if re.match(r"(min|max)_|rank_block", name)}
    assert {type(members[name]) for name in limits} == {int}
    assert all(callable(members[name]) for name in members.keys() - limits)


def test_every_member_is_typed(kernels):
    """mypy takes the members' types from the functions that they are."""
    for name, member in vars(kernels).items():
        if isinstance(member, FunctionType):
            function = inspect.unwrap(member)  # of a context manager
            kinds = [one.annotation for one in inspect.signature(function).parameters.values()]
            kinds.append(inspect.signature(function).return_annotation)
            assert inspect.Parameter.empty not in kinds, name
            assert not any("Any" in str(kind) for kind in kinds), name


def test_every_member_is_used(kernels):
    source = "".join(path.read_text() for path in TOOLKIT.rglob("*.py"))
    used = {name for name in vars(kernels) if re.search(rf"kernels(_for\(.*\))?\.{name}\b", source)}
    assert set(vars(kernels)) - used == {"_late_compilations"}


def test_every_computing_entry_has_a_contract_test(kernels):
    assert set(vars(kernels)) - NOT_COMPUTING - ON_SEVERAL_GPUS == set(CONTRACTS)
    for place in set(CONTRACTS.values()):
        file, _, name = place.partition("::")
        module = ast.parse((Path(__file__).parent / file).read_text())
        (test,) = (
            one for one in module.body if isinstance(one, ast.FunctionDef) and one.name == name
        )
        marks = [ast.unparse(mark) for mark in test.decorator_list]
        assert not {"gpu", "pytest.mark.gpu"} & set(marks), place


def test_each_device_has_a_table(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert type(kernels_for(cpu)) is CPUKernels
    assert triton_kernels_for(cpu) is None
    with only_pytorch("reference"):
        assert type(kernels_for(cpu)) is type(kernels_for(gpu)) is Kernels
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(table, "gpu_kernels", gpu_kernels.__wrapped__)
    assert type(kernels_for(gpu)) is Kernels
    assert triton_kernels_for(gpu) is None


def triton_imports(node: ast.AST) -> list[str]:
    """Return the modules of `kernels` for GPUs that a module imports to run."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return []
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    found = [
        one for one in names if re.match(r"toolkit\.kernels\.(triton|cublas|products|sums)\b", one)
    ]
    return found + [one for child in ast.iter_child_nodes(node) for one in triton_imports(child)]


def test_only_the_table_imports_triton_kernels():
    sources = {path: path.read_text() for path in TOOLKIT.rglob("*.py")}
    found = {
        str(path.relative_to(TOOLKIT)): triton_imports(ast.parse(source))
        for path, source in sources.items()
        if re.search(r"toolkit\.kernels", source)
    }
    assert {name for name, imports in found.items() if imports} == IMPORTS_ALLOWED
