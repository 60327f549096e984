"""Finding, loading and refusing plug-ins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoints
from toolkit import LLM
from toolkit.api.http.plugins import FrontEndPlugins
from toolkit.config import ServerConfig
from toolkit.doctor.plugins import check_plugins
from toolkit.errors import CheckpointError, ConfigError, PluginError
from toolkit.models.config import registry
from toolkit.text.parsers import Parsers
from toolkit.text.reasoning import DeepSeekR1Format
from toolkit.text.tool_formats import HermesFormat, MistralFormat

BROKEN = {
    "tk.models": "odd-kind = brokenpack",
    "tk.tool_parsers": "odd = json:JSONDecoder\nhermes = json:JSONDecoder",
    "tk.reasoning_parsers": "absent = json:Nothing",
    "tk.middleware": "strange = json:loads",
}
FILE = """
from toolkit.text.reasoning import ReasoningFormat
from toolkit.text.tool_formats import HermesFormat, MistralFormat

class Brackets(ReasoningFormat):
    start, end = "[[", "]]"

TOOL_PARSERS = {"ours": MistralFormat}
REASONING_PARSERS = {"brackets": Brackets}
"""


@pytest.fixture
def broken(install: Callable[..., Path]) -> Path:
    folder = install("broken-pack", BROKEN)
    (folder / "brokenpack.py").write_text("raise RuntimeError('needs\\nlibfoo 3')")
    return folder


def test_broken_plug_ins_are_left_out_with_one_warning_each(broken, caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="toolkit"):
        for _ in range(2):
            found = FrontEndPlugins.load(ServerConfig(), strict=False)
        registry.load_plugins(strict=False)
    assert found == FrontEndPlugins()
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"Cannot use the plug-in {where}. Update or uninstall broken-pack. --strict-plugins makes "
        "this an error."
        for where in (
            "'absent' of broken-pack 0.3 (tk.reasoning_parsers, json:Nothing): AttributeError: "
            "module 'json' has no attribute 'Nothing'",
            "'hermes' of broken-pack 0.3 (tk.tool_parsers, json:JSONDecoder): tk has its own "
            "'hermes', which is used",
            "'odd' of broken-pack 0.3 (tk.tool_parsers, json:JSONDecoder): it has no markers, "
            "grammar, add, end",
            "'odd_kind' of broken-pack 0.3 (tk.models, brokenpack): RuntimeError: needs libfoo 3",
            "'strange' of broken-pack 0.3 (tk.middleware, json:loads): it is neither a class nor "
            "an async function",
        )
    ]


def test_strict_refuses_to_start(broken, checkpoint) -> None:
    with pytest.raises(PluginError, match=r"'strange' of broken-pack 0\.3"):
        FrontEndPlugins.load(ServerConfig(), strict=True)
    with pytest.raises(PluginError, match="RuntimeError: needs libfoo 3"):
        LLM(str(checkpoint("gpt2")), device="cpu", strict_plugins=True)


def test_serve_reports_a_plug_in_before_it_loads_the_model(tk_here, broken) -> None:
    for arguments in (
        ["--strict-plugins"],
        ["--tool-call-parser", "odd"],
        ["--middleware", "no_such_module:Name"],
    ):
        done = tk_here("serve", "--port", "0", *arguments)
        assert done.returncode == 2
        assert "Cannot use the plug-in" in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr


def test_broken_model_is_an_error_for_that_model_alone(broken, checkpoint, tmp_path, tk_here):
    folder = checkpoint("gpt2")
    assert "yes" in tk_here("show", str(folder)).stdout
    other = checkpoints.save(checkpoints.make_reference("gpt2"), tmp_path / "other")
    checkpoints.edit_json(other / "config.json", model_type="odd-kind", architectures=["Odd"])
    assert "needs libfoo 3" in tk_here("show", str(other)).stdout
    with pytest.raises(PluginError, match="needs libfoo 3"):
        LLM(str(other), device="cpu")
    checkpoints.edit_json(other / "config.json", model_type="unknown")
    with pytest.raises(CheckpointError, match="unsupported architecture 'Odd'"):
        LLM(str(other), device="cpu")


def test_built_in_architecture_wins(install, checkpoint) -> None:
    install("taking", {"tk.models": "gpt2 = json"})
    LLM(str(checkpoint("gpt2")), device="cpu", num_gpu_blocks_override=20)
    with pytest.raises(PluginError, match="tk has its own 'gpt2', which is used"):
        registry.load_plugins(strict=True)


def test_two_packages_with_one_name_keep_the_first(install) -> None:
    install("one", {"tk.tool_parsers": "same = toolkit.text.tool_formats:HermesFormat"})
    install("two", {"tk.tool_parsers": "same = toolkit.text.tool_formats:MistralFormat"})
    chosen = Parsers.choose(ServerConfig(tool_call_parser="same"))
    assert chosen.tool_format is HermesFormat
    with pytest.raises(PluginError, match=r"'same' of two 0\.3.*one 0\.3 has one of the same name"):
        Parsers.choose(ServerConfig(), strict=True)


def test_doctor_has_one_line_per_plug_in(broken, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(broken))
    found = list(check_plugins())
    assert {one.status for one in found} == {"fail"}
    assert len(found) == 5
    assert "RuntimeError: needs libfoo 3" in found[0].text
    assert found[0].fix == "pip install --upgrade broken-pack"


def test_doctor_survives_a_plug_in_that_ends_its_process(broken, monkeypatch) -> None:
    (broken / "brokenpack.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    [found] = check_plugins()
    assert found.status == "fail"
    assert "'odd_kind' of broken-pack 0.3" in found.text


def test_files_add_parsers(tmp_path: Path) -> None:
    path = tmp_path / "formats.py"
    path.write_text(FILE)
    config = ServerConfig(
        tool_call_parser="ours",
        tool_parser_plugin=str(path),
        reasoning_parser="brackets",
        reasoning_parser_plugin=str(path),
    )
    chosen = Parsers.choose(config)
    assert chosen.tool_format is MistralFormat
    assert chosen.reasoning_format is not None
    splitter = chosen.reasoning_format("possible")
    parts = [splitter.add(text) for text in ("[", "[ a", " ] ", "]", "] b")]
    assert ("".join(a for a, _ in parts), "".join(b for _, b in parts)) == ("a ]", "b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("TOOL_PARSERS = []", r'it has no TOOL_PARSERS = \{"name": Class\}'),
        ("TOOL_PARSERS = {'x': 1}", "it has no markers"),
        (
            "from toolkit.text.tool_formats import ToolFormat\nTOOL_PARSERS = {'x': ToolFormat}",
            "it does not implement _read, grammar",
        ),
        (FILE.replace('"ours"', '"hermes"'), "tk has its own 'hermes'. Choose another name"),
    ],
)
def test_broken_files_are_errors(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "broken.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PluginError, match=message):
        Parsers.choose(ServerConfig(tool_parser_plugin=str(path)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tool_call_parser": "hermess"},
            r"--tool-call-parser must be one of auto, none, hermes, llama3_json, mistral, "
            r"openai, generic, at; got 'hermess'\. Did you mean hermes\?",
        ),
        (
            {"reasoning_parser": "x"},
            r"must be one of auto, none, qwen3, deepseek_r1, openai_gptoss, notes; got 'x'\. "
            r"auto, the default, detects the format\. docs/plugins\.md says how to add another\.$",
        ),
    ],
)
def test_unknown_names_list_the_known_ones(
    example: Path, forget, monkeypatch, settings: dict[str, Any], message: str
) -> None:
    monkeypatch.syspath_prepend(example)
    with pytest.raises(ConfigError, match=message) as found:
        Parsers.choose(ServerConfig(**settings))
    assert found.value.param in settings
    assert Parsers.choose(ServerConfig(reasoning_parser="deepseek_r1")).reasoning_format is (
        DeepSeekR1Format
    )


def test_nothing_is_loaded_from_the_checkpoint_s_folder(checkpoint, tmp_path) -> None:
    folder = checkpoints.save(checkpoints.make_reference("gpt2"), tmp_path / "evil")
    for name in ("configuration_gpt2.py", "modeling_gpt2.py", "tk_plugin.py", "__init__.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    checkpoints.edit_json(
        folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_gpt2.GPT2"}
    )
    LLM(str(folder), device="cpu", num_gpu_blocks_override=20)
    assert not (tmp_path / "ran").exists()
