"""Command lines of vLLM and llama.cpp: a flag is honoured, without effect, or refused by name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli import vllm_flags
from toolkit.cli.command import given_settings
from toolkit.cli.help import HELP_FLAGS, settings_of
from toolkit.cli.names import COMMANDS
from toolkit.cli.root import tree
from toolkit.cli.vllm import rules_of, translate
from toolkit.config import llama_cpp
from toolkit.config.fields import Option
from toolkit.config.vllm import SERVE, Note, Outcome, Refusal, Table, Use
from toolkit.errors import ConfigError

ROOT = Path(__file__).parents[2]
LISTS = {
    "serve": (vllm_flags.SERVE, vllm_flags.OLDER_SERVE),
    "bench serve": (vllm_flags.BENCH, vllm_flags.OLDER_BENCH),
}


def command_of(words: str) -> Any:
    command = tree()
    for word in words.split():
        command = command.commands[word]
    return command


def flags_of(words: str) -> set[str]:
    """Return the flags of a command of tk."""
    return {flag for p in command_of(words).params for flag in (*p.opts, *p.secondary_opts)}


def settings(words: str, line: list[str]) -> dict[str, Any]:
    """Return the settings that a command line gives."""
    command = command_of(words)
    # Commands keep the flags of help of the first context.
    names = {"help_option_names": HELP_FLAGS}
    context = command.make_context(f"tk {words}", line, **names)
    rows = list(settings_of(command).values())
    found = given_settings(rows, context.params, tuple(words.split()), tree())
    return {name: one.value for name, one in found.items()}


def listed(words: str) -> list[tuple[str, str]]:
    """Return the flags of vLLM, and what each takes: a value, several values, or none."""
    return [
        (name, "several" if value == "..." else "one" if has_value else "")
        for text in " ".join(LISTS[words]).split()
        for name, has_value, value in [text.partition("=")]
    ]


@pytest.mark.parametrize("words", LISTS)
def test_every_flag_of_vllm_is_in_one_class(words: str):
    own, rules = flags_of(words), rules_of(words)
    known = {*own, *rules}
    for name, takes in listed(words):
        opposite = re.sub("^--(enable|disable)-", lambda m: f"--no-{swapped(m[1])}-", name)
        bare = [name, re.sub("^--no-", "--", name), opposite.replace("--no-", "--")]
        assert known & set(bare), name
        if name in rules:
            assert rules[name].takes == takes, name
            assert name not in own or "" not in rules[name].outcomes, name
    older_and_newer = {name for name, _ in listed(words)}
    others = rules_in(llama_cpp.SERVE) if words == "serve" else set()
    assert set(rules) <= older_and_newer | others | {"--help", "--no-self-timed"}


def test_no_flag_has_the_meanings_of_two_programs():
    assert not rules_in(llama_cpp.SERVE) & rules_in(SERVE)


def rules_in(table: Table) -> set[str]:
    return {flag.partition("=")[0] for _, flags in table for flag in flags.split()}


def swapped(word: str) -> str:
    return {"enable": "disable", "disable": "enable"}[word]


SAMPLES = {int: "8", float: "1", str: "a", dict: '{"a": 1}', tuple: "a", bool: ""}
"""A value of each type. Choices have others."""


def rows_of(words: str, kind: type[Outcome]) -> list[tuple[str, str, Any]]:
    """Return (flag, value, outcome) of each outcome of a kind. The value "" stands for any."""
    return [
        (name, value, outcome)
        for name, rule in rules_of(words).items()
        for value, outcome in rule.outcomes.items()
        if isinstance(outcome, kind)
    ]


def line_of(words: str, name: str, value: str, sample: str = "8") -> list[str]:
    """Return the words of a flag of the table."""
    takes = rules_of(words)[name].takes
    return [name, value or sample] if takes and name != "--help" else [name]


@pytest.mark.parametrize("words", LISTS)
def test_honoured_flags_set_what_the_table_says(words: str):
    rows = {row.flag: row for row in settings_of(command_of(words)).values()}
    for name, value, use in rows_of(words, Use):
        if not use.flags or name == "--help":
            continue
        targets = [flag.partition(" ") for flag in re.findall(r"--\S+(?: [^-]\S*)?", use.flags)]
        own = [rows[flag.partition(".")[0].replace("--no-", "--")] for flag, _, _ in targets]
        sample = str(own[0].choices[0]) if own[0].choices else SAMPLES[own[0].type]
        found = settings(words, line_of(words, name, value, sample))
        assert set(found) == {row.name for row in own}, name
        for row, (flag, _, template) in zip(own, targets, strict=True):
            if "." in flag:
                assert list(found[row.name]) == [flag.partition(".")[2]], name
            elif "{" not in template:
                expected = template or ("false" if flag.startswith("--no-") else "true")
                assert found[row.name] == row.parse(expected, flag), name


@pytest.mark.parametrize("words", LISTS)
def test_flags_without_effect_are_noted(words: str):
    for name, value, note in rows_of(words, Note):
        rest, notes = translate(line_of(words, name, value), settings_of(command_of(words)), words)
        assert rest == []
        assert len(notes) == 1
        assert re.match(rf"{re.escape(name)}( \S+)? has no effect\. ", notes[0]), notes
        assert notes[0].endswith(f"{note.reason}.")


@pytest.mark.parametrize("words", LISTS)
def test_flags_that_are_missing_are_refused_by_name(words: str):
    for name, value, refusal in rows_of(words, Refusal):
        with pytest.raises(ConfigError) as refused:
            translate(line_of(words, name, value), settings_of(command_of(words)), words)
        assert refused.value.message.startswith(f"tk has no {name}")
        assert refused.value.message.endswith(refusal.advice)


@pytest.mark.parametrize("words", LISTS)
def test_advice_names_what_exists(words: str):
    flags = set().union(*map(flags_of, (*LISTS, "bench offline")))
    for text in [note.reason for *_, note in rows_of(words, Note)] + [
        refusal.advice for *_, refusal in rows_of(words, Refusal)
    ]:
        assert set(re.findall(r"--[a-z][a-z-]*[a-z]", text)) <= flags, text
        assert set(re.findall(r"'tk ([a-z]+)", text)) <= {*COMMANDS}, text
        for page in re.findall(r"docs/[\w-]+\.md", text):
            assert (ROOT / page).is_file(), text


SPECULATION = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-tp 2 -pp 1 -dp=2", {"tensor_parallel_size": 2, "pipeline_parallel_size": 1,
                               "data_parallel_size": 2}),
        ("--max_model_len 8k --max-num-batched-tokens=1M", {"max_model_len": 8000,
                                                            "max_num_batched_tokens": 2**20}),
        ("--dtype half --kv-cache-memory-bytes 2G", {"dtype": "float16", "kv_cache_memory": 2.0}),
        ("--dtype bfloat16", {"dtype": "bfloat16"}),
        ("--disable-prefix-caching --enable-log-requests --no-enable-log-stats",
         {"enable_prefix_caching": False, "disable_log_requests": False,
          "disable_log_stats": True}),
        ("--served-model-name a --model m", {"model": "m", "served_model_name": ["a"]}),
        ("m --api-key a b", {"model": "m", "api_key": ["a", "b"]}),
        ("""--allowed-origins ["a","b"] --allowed-origins c""", {"allowed_origins":
                                                                 ["a", "b", "c"]}),
        ("""m --lora-modules {"name":"a","path":"b"} {"name":"c","path":"d"}""",
         {"model": "m", "lora_modules":
          ['{"name":"a","path":"b"}', '{"name":"c","path":"d"}']}),
        ("--spec-method ngram --spec-tokens 3", {"speculative_config": SPECULATION}),
        ("""--speculative_config.num_speculative_tokens 3 -sc {"method":"ngram"}""",
         {"speculative_config": SPECULATION}),
        ("--hf-overrides.a.b 1k --hf-overrides.a.c=x --hf-overrides.d+ e,f",
         {"hf_overrides": {"a": {"b": 1000, "c": "x"}, "d": ["e", "f"]}}),
        ("--limit-mm-per-prompt.image 2 --limit-mm-per-prompt video=0",
         {"limit_mm_per_prompt": {"image": 2, "video": 0}}),
        ("--max-logprobs 20 --override-generation-config.max_new_tokens 1k",
         {"max_logprobs": 20, "override_generation_config": {"max_new_tokens": 1000}}),
        ("-O3 --optimization-level 1 --cudagraph-capture-sizes 1 2 4 --port 1", {"port": 1}),
        ("--max-num-active-seqs 4 --max-num-seqs 8", {"max_num_seqs": 4}),
        ("-m a.gguf -c 8192 -np 4 -t 2 -ngl 99 -fa on --jinja -a x --temp 0.5 --top-k 9",
         {"model": "a.gguf", "max_model_len": 8192, "max_num_seqs": 4, "num_threads": 2,
          "served_model_name": ["x"],
          "override_generation_config": {"temperature": 0.5, "top_k": 9}}),
        ("-hf a/b:Q4_K_M -ngl 0 -c 0", {"model": "a/b:Q4_K_M", "device": "cpu"}),
        ("--no-enable-sleep-mode --disable-log-deltas --generation-config auto", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_command_lines_of_serve(line: str, expected: dict[str, Any]):
    assert settings("serve", line.split()) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--host h --port 8001 --backend openai-chat", {"url": "http://h:8001",
                                                        "endpoint": "chat"}),
        ("--port 1 --base-url http://a:2", {"url": "http://a:2"}),
        ("--endpoint /v1/chat/completions --backend vllm", {"endpoint": "/v1/chat/completions"}),
        ("--served-model-name a --model b", {"model": "a"}),
        ("--prefix-repetition-suffix-len 9 --dataset-name prefix_repetition",
         {"dataset_name": "prefix", "random_input_len": 9}),
        ("--temperature 0.5 --top-k 8", {"extra_body": {"temperature": 0.5, "top_k": 8}}),
        ("--custom-output-len -1 --label x", {"metadata": ["label=x"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_command_lines_of_vllm_bench_serve(line: str, expected: dict[str, Any]):
    assert settings("bench serve", line.split()) == expected


@pytest.mark.parametrize(
    ("words", "line", "problem"),
    [
        ("serve", "--max-model-len auto", "tk has no --max-model-len auto. "),
        ("serve", "--kv-cache-memory-bytes 8GB", "--kv-cache-memory-bytes must be a number such"),
        ("serve", "--max-model-len 1.0001k", "--max-model-len must be a whole number; got"),
        ("serve", "--swap-space 4G", "--swap-space must be a number; got '4G'."),
        ("serve", "--runner", "--runner needs a value."),
        ("serve", "--enforce_eager true", "--enforce_eager takes no value; got 'true'. Write"),
        ("serve", "--enable-chunked-prefill False", "alone, or --no-enable-chunked-prefill for"),
        ("serve", "--enable-prefix-caching=True", "Write --enable-prefix-caching alone, or --no"),
        ("serve", "--hf-overrides [1] --hf-overrides.a 1", "--hf-overrides must be a JSON object"),
        ("bench serve", "--dataset-name sonnet", "tk has no --dataset-name sonnet. "),
    ],
)
def test_values_that_cannot_be_used_are_refused(words: str, line: str, problem: str):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        settings(words, line.split())


def test_yaml_files_have_flags(tmp_path: Path):
    path = tmp_path / "vllm.yaml"
    path.write_text(
        "model: m\nmax_model_len: 8k\nserved-model-name: [a, b]\nseed: 1\n"
        "enable-prefix-caching: false\nenable-auto-tool-choice: true\n"
        "speculative-config: {method: ngram, num_speculative_tokens: 3}\n"
    )
    assert settings("serve", ["--seed", "2", "--config", str(path)]) == {
        "model": "m", "max_model_len": 8000, "served_model_name": ["a", "b"], "seed": 2,
        "enable_prefix_caching": False, "speculative_config": SPECULATION,
    }  # fmt: skip
    line = ["other", "--served_model_name", "c", "--config", str(path)]
    overridden = settings("serve", line)
    assert (overridden["model"], overridden["served_model_name"]) == ("other", ["c"])
    for text in ("a: [", "text"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"--config.* {re.escape(str(path))}"):
            settings("serve", [f"--config={path}"])


def test_notes_are_warnings(tk_here: Callable[..., Any], caplog: pytest.LogCaptureFixture):
    done = tk_here(
        *("config", "show", "--command", "bench serve", "--json", "--disable-tqdm"),
        "--url=--disable-shuffle",
    )
    assert done.returncode == 0
    assert caplog.messages == ["--disable-tqdm has no effect. Progress is shown on terminals."]
    assert json.loads(done.stdout)["bench serve"]["url"]["value"] == "--disable-shuffle"


def test_download_dir_is_the_cache_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HF_HUB_CACHE", "elsewhere")
    monkeypatch.chdir(tmp_path)
    assert settings("serve", ["--download-dir", "models"]) == {}
    assert os.environ["HF_HUB_CACHE"] == str(tmp_path / "models")


def test_words_of_a_subcommand_and_values_are_left_alone():
    rows: dict[str, Option] = settings_of(command_of("bench"))
    line = ["--url", "--a_b", "--rps=1", "serve", "--num_prompts", "--rps"]
    assert translate(line, rows, "bench", is_group=True) == (line, [])
    assert translate(["--", "--a_b"], rows, "bench") == (["--", "--a_b"], [])


def test_all_refused_flags_are_in_one_message():
    line = ["--hf-token", "x", "--port", "1", "--enable_sleep_mode", "--cpu-offload-gb", "4"]
    with pytest.raises(ConfigError) as refused:
        settings("serve", line)
    assert [text.split(".")[0] for text in refused.value.message.splitlines()] == [
        "tk has no --hf-token",
        "tk has no --enable-sleep-mode",
        "tk has no --cpu-offload-gb 4",
    ]


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("--api-key --enable-prefix-caching", "--api-key"),
        ("--served_model_name --dtype=half", "--served-model-name"),
        ("--max-log-len --no-enforce-eager", "--max-log-len"),
    ],
)
def test_a_flag_is_not_the_value_of_another(line: str, flag: str):
    with pytest.raises(ConfigError, match=rf"^{flag} needs a value, and \S+ after it is a flag"):
        settings("serve", line.split())
    assert settings("serve", ["--api-key=--dtype"]) == {"api_key": ["--dtype"]}
