"""Settings: precedence of their sources, validation, and error messages."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import toolkit.config
from toolkit.cli.help import known_settings
from toolkit.cli.root import tree
from toolkit.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    PictureConfig,
    SchedulerConfig,
    ServerConfig,
    build,
    options,
    sources,
)
from toolkit.errors import ConfigError

ROWS = [
    row
    for config in (ModelConfig, ServerConfig, CacheConfig, SchedulerConfig)
    for row in options(config)
]


KNOWN = known_settings(tree())


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write tk.toml in the current folder."""
    monkeypatch.chdir(tmp_path)
    return (tmp_path / "tk.toml").write_text


def resolve(rows, flags, environment=None, **more):
    """Return the values without their origins."""
    given = sources.resolve(rows, flags, ("serve",), KNOWN, environment=environment, **more)
    return {name: one.value for name, one in given.items()}


class TestPrecedence:
    def test_a_json_object_is_read_from_every_source(self, toml):
        rows, scaling = options(ModelConfig), {"rope_type": "yarn", "factor": 4.0}
        toml('rope_scaling = {rope_type = "yarn", factor = 4.0}')
        assert resolve(rows, {})["rope_scaling"] == scaling
        text = '{"rope_type": "yarn", "factor": 2}'
        assert resolve(rows, {}, {"TK_ROPE_SCALING": text})["rope_scaling"]["factor"] == 2
        for wrong, words in (
            ("{", "not valid JSON"),
            ("[1]", "must be a JSON object"),
            ("a", "not valid JSON"),
        ):
            with pytest.raises(ConfigError, match=f"TK_ROPE_SCALING .*{words}"):
                resolve(rows, {}, {"TK_ROPE_SCALING": wrong})

    def test_flag_overrides_variable_overrides_file_overrides_default(self, toml):
        flags, variables = {"max_num_seqs": 1}, {"TK_MAX_NUM_SEQS": "2"}
        given = []
        toml("max_num_seqs = 3")
        for flag, variable in ((flags, variables), ({}, variables), ({}, {})):
            given.append(resolve(ROWS, flag, variable)["max_num_seqs"])
        assert given == [1, 2, 3]
        toml("")
        assert "max_num_seqs" not in resolve(ROWS, {}, {})
        assert SchedulerConfig().max_num_seqs == 256

    def test_settings_have_an_origin(self, toml, tmp_path):
        toml("seed = 3\n[serve]\nblock_size = 8")
        given = sources.resolve(
            ROWS,
            {"port": 1},
            ("serve",),
            KNOWN,
            environment={"TK_DTYPE": "float16", "TK_PORT": "2"},
        )
        assert {name: (one.value, one.origin) for name, one in given.items()} == {
            "port": (1, "--port"),
            "dtype": ("float16", "TK_DTYPE"),
            "seed": (3, str(tmp_path / "tk.toml")),
            "block_size": (8, f"{tmp_path / 'tk.toml'} [serve]"),
        }

    def test_absent_flags_are_ignored(self, toml):
        assert resolve(ROWS, {"seed": None, "port": 0}, {"TK_SEED": "4"}) == {"seed": 4, "port": 0}

    def test_process_environment_is_read(self, toml, monkeypatch):
        monkeypatch.setenv("TK_DTYPE", "float16")
        assert resolve(ROWS, {}) == {"dtype": "float16"}

    def test_named_file_overrides_current_folder_overrides_home(self, toml, tmp_path, monkeypatch):
        """Only one of the files is read."""
        home = tmp_path / "home" / ".config" / "tk"
        home.mkdir(parents=True)
        (home / "tk.toml").write_text("seed = 1")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert resolve(ROWS, {}, {}) == {"seed": 1}
        toml("port = 2")
        assert resolve(ROWS, {}, {}) == {"port": 2}
        (tmp_path / "other.toml").write_text("seed = 3")
        (tmp_path / "another.toml").write_text("seed = 4")
        variable = {"TK_CONFIG": str(tmp_path / "other.toml")}
        assert resolve(ROWS, {}, variable) == {"seed": 3}
        assert resolve(ROWS, {}, variable, file="another.toml") == {"seed": 4}

    def test_user_folder_follows_xdg_config_home(self, toml, tmp_path):
        (tmp_path / "xdg" / "tk").mkdir(parents=True)
        (tmp_path / "xdg" / "tk" / "tk.toml").write_text("seed = 5")
        assert resolve(ROWS, {}, {"XDG_CONFIG_HOME": str(tmp_path / "xdg")}) == {"seed": 5}

    def test_missing_named_file_is_an_error(self, toml):
        with pytest.raises(
            ConfigError, match=r"--config names .*nowhere\.toml, which does not exist"
        ):
            resolve(ROWS, {}, {}, file="nowhere.toml")
        with pytest.raises(ConfigError, match="TK_CONFIG names"):
            resolve(ROWS, {}, {"TK_CONFIG": "nowhere.toml"})


class TestFile:
    def test_keys_accept_dashes_and_underscores(self, toml):
        toml('max-num-seqs = 3\nmax_model_len = 9\nenable-prefix-caching = false\nmodel = "gpt2"')
        assert resolve(ROWS, {}, {}) == {
            "max_num_seqs": 3,
            "max_model_len": 9,
            "enable_prefix_caching": False,
            "model": "gpt2",
        }

    def test_keys_of_other_commands_are_ignored(self, toml):
        toml("request_rate = 5.0\nseed = 3\ninterval = 2.0")
        assert resolve(ROWS, {}, {}) == {"seed": 3}

    def test_section_applies_to_its_command_and_overrides_top_level(self, toml):
        toml("seed = 1\nport = 2\n[run]\nseed = 4\n[serve]\nseed = 3\n[bench.offline]\nseed = 5")
        assert resolve(ROWS, {}, {}) == {"seed": 3, "port": 2}
        rows = [row for row in ROWS if row.name == "seed"]
        for command, seed in ((("run",), 4), (("bench", "offline"), 5), (("bench", "latency"), 1)):
            assert sources.resolve(rows, {}, command, KNOWN, environment={})["seed"].value == seed

    def test_unknown_key_is_an_error_with_a_suggestion(self, toml):
        toml("max_num_sequences = 3")
        with pytest.raises(ConfigError, match=r"tk\.toml.*'max_num_sequences'.*max_num_seqs"):
            resolve(ROWS, {}, {})

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ("[srve]\nport = 1", r"unknown section \[srve\]\. Did you mean serve"),
            (
                "[bench.ofline]\nseed = 1",
                r"unknown section \[bench\.ofline\]\. Did you mean offline",
            ),
            ("[zzz]\nport = 1", r"Sections: .*serve"),
            ("[run]\nport = 1", r"unknown setting 'port' in \[run\]"),
            ("[serve]\nprt = 1", r"unknown setting 'prt' in \[serve\]\. Did you mean port"),
        ],
    )
    def test_unknown_section_or_key_is_an_error_in_every_command(self, toml, content, says):
        toml(content)
        for command in (("serve",), ("top",)):
            with pytest.raises(ConfigError, match=says):
                sources.resolve([], {}, command, KNOWN, environment={})

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ("seed = ", "not valid TOML"),
            ("seed = true", r"tk\.toml: seed must be a whole number; got True"),
            ('seed = "3"', r"tk\.toml: seed must be a whole number; got '3'"),
            ("seed = -1", "at least 0"),
            (f"seed = {2**63}", "at most"),
            ("enable_prefix_caching = 1", "must be true or false; got 1"),
            ('dtype = "int4"', "auto, float32, bfloat16, float16"),
            ("[seed]\nx = 1", r"tk\.toml: seed must be a whole number"),
        ],
    )
    def test_invalid_values_are_refused(self, toml, content, says):
        toml(content)
        with pytest.raises(ConfigError, match=says):
            resolve(ROWS, {}, {})

    def test_every_settings_class_belongs_to_a_command(self):
        found = set()
        for module in pkgutil.iter_modules(toolkit.config.__path__, "toolkit.config."):
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, type) and dataclasses.is_dataclass(value):
                    found |= {row.name for row in options(value)}
        assert found == {name for names in KNOWN.values() for name in names}


class TestValues:
    @pytest.mark.parametrize("text", ["1", "true", "yes", "on", " TRUE ", "On"])
    def test_spellings_of_true(self, toml, text):
        assert resolve(ROWS, {}, {"TK_ENABLE_PREFIX_CACHING": text}) == {
            "enable_prefix_caching": True
        }

    @pytest.mark.parametrize("text", ["0", "false", "no", "off", "False"])
    def test_spellings_of_false(self, toml, text):
        assert resolve(ROWS, {}, {"TK_ENABLE_PREFIX_CACHING": text}) == {
            "enable_prefix_caching": False
        }

    @pytest.mark.parametrize("text", ["", "2", "maybe", "tru"])
    def test_other_text_for_a_switch_is_refused(self, toml, text):
        with pytest.raises(ConfigError, match="TK_ENABLE_PREFIX_CACHING must be true or false"):
            resolve(ROWS, {}, {"TK_ENABLE_PREFIX_CACHING": text})

    @pytest.mark.parametrize(
        ("variable", "text"),
        [
            ("TK_PORT", "http"),
            ("TK_PORT", "k"),
            ("TK_PORT", "0.0001K"),
            ("TK_PORT", "8 k"),
            ("TK_PORT", "80.5"),
            ("TK_SWAP_SPACE", "4GB"),
            ("TK_SEED", ""),
        ],
    )
    def test_variable_that_is_not_a_number_is_refused(self, toml, variable, text):
        with pytest.raises(ConfigError, match=f"{variable} must be a.* number; got '{text}'"):
            resolve(ROWS, {}, {variable: text})

    @pytest.mark.parametrize(
        ("text", "number"), [("8k", 8000), ("8K", 8192), ("1.5m", 1_500_000), ("1M", 2**20)]
    )
    def test_whole_numbers_have_suffixes(self, toml, text, number):
        assert resolve(ROWS, {}, {"TK_SEED": text}) == {"seed": number}

    def test_model_may_have_ollamas_tag(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "mine:latest").mkdir()
        for given, name in (
            ("gpt2:latest", "gpt2"),
            ("a/b:Q8_0", "a/b:Q8_0"),
            ("mine:latest",) * 2,
        ):
            assert ModelConfig(model=given).model == name

    @pytest.mark.parametrize(
        ("text", "most"),
        [
            ("image=2", 2),
            ("image=2,video=0", 2),
            ('{"image": 3, "audio": 0}', 3),
            ('{"video": 0}', 4),
            ("image=2,video=1", None),
            ({"image": 5}, 5),
            ("image=", None),
            ('{"image": true}', None),
            ('{"image": 1025}', None),
        ],
    )
    def test_limit_of_pictures(self, text, most):
        if most is not None:
            assert PictureConfig(limit_mm_per_prompt=text).most_pictures == most
            return
        with pytest.raises(ConfigError, match=r"--limit-mm-per-prompt must be like image=4"):
            PictureConfig(limit_mm_per_prompt=text)

    def test_variable_may_be_a_list_in_json(self, toml):
        found = resolve(ROWS, {}, {"TK_API_KEY": '["a,b", "c"]'})
        assert found == {"api_key": ("a,b", "c")}

    @pytest.mark.parametrize(
        ("config", "name", "low", "high"),
        [
            (ServerConfig, "port", 0, 65535),
            (CacheConfig, "block_size", 1, 256),
            (CacheConfig, "gpu_memory_utilization", 0.05, 1.0),
        ],
    )
    def test_bounds_are_inclusive(self, config, name, low, high):
        for good in (low, high):
            assert getattr(build(config, {name: good}), name) == good
        step = 1 if isinstance(low, int) else 1e-6
        for bad, word in ((low - step, "at least"), (high + step, "at most")):
            with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be {word}"):
                build(config, {name: bad})

    @pytest.mark.parametrize("name", ["swap_space", "kv_cache_memory", "gpu_memory_utilization"])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_sizes_must_be_finite(self, name, value):
        with pytest.raises(ConfigError, match=name.replace("_", "-")):
            CacheConfig(**{name: value})

    def test_integers_are_valid_numbers_but_not_the_reverse(self):
        assert CacheConfig(swap_space=4).swap_space == 4.0
        with pytest.raises(ConfigError, match="whole number"):
            CacheConfig(block_size=16.0)
        with pytest.raises(ConfigError, match="whole number"):
            CacheConfig(block_size=True)

    @pytest.mark.parametrize(
        ("config", "name"),
        [
            (ModelConfig, "dtype"),
            (DeviceConfig, "device"),
            (SchedulerConfig, "scheduling_policy"),
            (ServerConfig, "log_level"),
        ],
    )
    def test_invalid_choice_lists_the_choices(self, config, name):
        (row,) = (row for row in options(config) if row.name == name)
        with pytest.raises(ConfigError) as caught:
            build(config, {name: "nonsense"})
        for choice in row.choices:
            assert choice in caught.value.message

    def test_unknown_names_get_a_suggestion(self):
        with pytest.raises(ConfigError, match="Did you mean gpu_memory_utilization"):
            EngineConfig.from_settings({"gpu_memory_utilisation": 0.5})
        with pytest.raises(ConfigError, match="Did you mean port"):
            build(ServerConfig, {"prt": 1})

    def test_arguments_of_vllm_are_translated(self, caplog):
        config = EngineConfig.from_settings(
            {
                "dtype": "half",
                "quantization": "gptq",
                "enable_chunked_prefill": False,
                "kv_cache_memory_bytes": 3 << 29,
                "language_model_only": True,
                "generation_config": "auto",
                "optimization_level": 0,
                "hf_token": None,
                "enable_sleep_mode": False,
            }
        )
        assert config.model.dtype == "float16"
        assert config.model.quantization is config.model.generation_config is None
        assert config.cache.kv_cache_memory == 1.5
        assert config.pictures.limit_mm_per_prompt == {"image": 0}
        assert config.device.enforce_eager
        assert [text.partition(".")[0] for text in caplog.messages] == [
            "quantization='gptq' has no effect",
            "enable_chunked_prefill=False has no effect",
        ]

    @pytest.mark.parametrize(
        ("given", "problem"),
        [
            ({"hf_token": "secret"}, "tk has no hf_token. ps would show it. Set the variable"),
            ({"download_dir": "/x"}, "tk has no download_dir. Set the variable HF_HUB_CACHE."),
            ({"max_model_len": -1}, "tk has no max_model_len=-1. tk serve --dry-run prints"),
            ({"rope_theta": 1.0}, "tk has no rope_theta. Use hf_overrides={'rope_theta': ...}."),
            ({"kv_cache_memory_bytes": "8G"}, "kv_cache_memory_bytes must be a number; got '8G'."),
            ({"port": 1}, "port is a setting of servers alone. Leave it out here."),
        ],
    )
    def test_arguments_that_tk_lacks_are_refused(self, given, problem):
        with pytest.raises(ConfigError) as refused:
            EngineConfig.from_settings(given)
        assert refused.value.message.startswith(problem)

    def test_config_is_immutable_and_copyable(self):
        config = EngineConfig.from_settings({"model": "x", "seed": 3})
        changed = config.with_settings(max_num_seqs=4)
        assert (
            changed.model.seed,
            changed.scheduler.max_num_seqs,
            config.scheduler.max_num_seqs,
        ) == (
            3,
            4,
            256,
        )
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.model.seed = 4


LIGHT = ("--version", "--help", "serve --help", "models", "show", "config show", "serve --dry-run")


class TestCommandLine:
    def test_help_shows_all_settings(self, tk_here):
        done = tk_here("serve", "--help-all", COLUMNS="200", NO_COLOR="1")
        assert done.returncode == 0, done.stderr
        shown = " ".join(done.stdout.split())
        for config in (ModelConfig, ServerConfig, DeviceConfig, CacheConfig, SchedulerConfig):
            for row in options(config):
                assert f"{row.flag} " in shown, row.flag
                assert row.help.split(".")[0].split()[0] in shown

    def test_commands_without_an_engine_import_nothing_heavy(self, tmp_path):
        """Runs them in one process. It prints what each has added to the imported libraries."""
        code = (
            "import sys\n"
            "from toolkit.cli import main\n"
            "heavy = ('torch', 'transformers', 'fastapi', 'textual', 'tokenizers', 'aiohttp')\n"
            f"for line in {LIGHT!r}:\n"
            "    sys.argv, code = ['tk', *line.split()], None\n"
            "    try: main()\n"
            "    except SystemExit as end: code = end.code\n"
            "    loaded = [name for name in heavy if name in sys.modules]\n"
            "    print('ended', line, code or 0, loaded)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        ended = [line for line in done.stdout.splitlines() if line.startswith("ended")]
        assert ended == [f"ended {line} 0 []" for line in LIGHT]

    def test_invalid_value_is_one_line_and_exit_code_2(self, tk_here, tmp_path):
        file = tmp_path / "tk.toml"
        cases = (
            (["--port", "70000"], {}, "", "--port"),
            ([], {"TK_PORT": "70000"}, "", "TK_PORT"),
            ([], {}, "[serve]\nport = 70000", f"{file} [serve]: port"),
        )
        for arguments, environment, content, name in cases:
            file.write_text(content)
            done = tk_here("serve", *arguments, cwd=tmp_path, **environment)
            assert done.returncode == 2
            assert done.stderr == f"tk: {name} must be at most 65535; got 70000.\n"
            assert done.stdout == ""


@pytest.mark.parametrize(
    ("variable", "key"),
    [*(("TK_API_KEY", key) for key in ("", " ", ",", ", ")), ("TK_ADMIN_KEY", "")],
)
def test_variable_with_an_empty_key_is_refused(variable: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{variable} is empty"):
        resolve(ROWS, {}, {variable: key})


@pytest.mark.parametrize("key", ['""', '" "', '[" "]', '["a", ""]'])
def test_file_with_an_empty_key_is_refused(key: str, toml) -> None:
    toml(f"[serve]\napi_key = {key}")
    with pytest.raises(ConfigError, match=r"tk\.toml \[serve\]: api_key is empty"):
        resolve(ROWS, {}, {})


@pytest.mark.parametrize(
    ("name", "key"),
    [("api_key", ("",)), ("api_key", ("a", " ")), ("admin_key", ""), ("admin_key", " ")],
)
def test_empty_key_is_refused(name: str, key: object) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is empty"):
        ServerConfig(**{name: key})


@pytest.mark.parametrize(("flag", "variables"), [(None, {"TK_CONFIG": ""}), ("", {})])
def test_empty_name_of_the_settings_file_is_refused(flag, variables, toml) -> None:
    with pytest.raises(ConfigError, match="not a regular file"):
        resolve(ROWS, {}, variables, file=flag)


@pytest.mark.parametrize(
    ("name", "value", "good"),
    [
        ("otlp_traces_endpoint", "http://127.0.0.1:4318/v1/traces", True),
        ("otlp_traces_endpoint", "https://traces.example", True),
        ("otlp_traces_endpoint", "foo", False),
        ("otlp_traces_endpoint", "ftp://traces.example/v1", False),
        ("otlp_traces_endpoint", "http://", False),
        ("forwarded_allow_ips", ("127.0.0.1", "10.0.0.1"), True),
        ("forwarded_allow_ips", ("10.0.0.0/8", "::1"), True),
        ("forwarded_allow_ips", ("*",), True),
        ("forwarded_allow_ips", ("127.0.0.1", "foo"), False),
        ("forwarded_allow_ips", ("10.0.0.1/8",), False),
    ],
)
def test_urls_and_proxy_addresses_are_checked(name, value, good):
    if good:
        assert getattr(ServerConfig(**{name: value}), name) == value
    else:
        bad = value if isinstance(value, str) else value[-1]
        with pytest.raises(
            ConfigError, match=rf"--{name.replace('_', '-')} must be an? .* such as .*'{bad}'"
        ):
            ServerConfig(**{name: value})


def test_num_threads_has_an_upper_bound():
    with pytest.raises(ConfigError, match="--num-threads must be at most 1024"):
        DeviceConfig(num_threads=100_000)
