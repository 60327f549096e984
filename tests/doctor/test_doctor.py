"""tk doctor on good and bad machines, and redaction by tk collect-env."""

from __future__ import annotations

import getpass
import json
import os
import socket

import pytest

import toolkit
from toolkit.doctor import installation, machine
from toolkit.doctor.redact import redact
from toolkit.doctor.shipped import COMPLETIONS
from toolkit.hardware.cores import Core, Cores
from toolkit.hardware.devices import Device

GIB = 2**30
GPU = Device("cuda", "NVIDIA H200", 140 * GIB, 139 * GIB)
FACTS = {
    "torch": "2.13.0", "cuda": "13.0", "available": True, "cpu_capability": "AVX512",
    "mkldnn": True, "num_threads": 4, "gpu": "NVIDIA H200", "capability": "9.0", "kernels": None,
    "product": None,
}  # fmt: skip


@pytest.mark.usefixtures("one_probe")
class TestCommand:
    def test_warnings_do_not_change_the_exit_code(self, tk_here, tmp_path):
        """A port in use, a misspelled variable, and no completions."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            done = tk_here(
                "doctor",
                "--json",
                cwd=tmp_path,
                TK_PORT=port,
                TK_PROT="1",
                SHELL="/bin/zsh",
                HF_HOME=str(tmp_path),
            )
        assert done.returncode == 0, done.stderr
        found = {one["name"]: one for one in json.loads(done.stdout)}
        assert not [one for one in found.values() if one["status"] == "fail"]
        assert found["torch"]["status"] == "pass"
        assert found["port"]["status"] == "warn"
        assert f"127.0.0.1:{port} is not available" in found["port"]["text"]
        assert str(os.getpid()) in found["port"]["text"]
        assert found["variables"]["text"] == "unknown: TK_PROT"
        assert "TK_PORT" in found["variables"]["fix"]
        assert found["completions"]["fix"] == "tk completion zsh --install"
        assert all(bool(one["fix"]) == (one["status"] != "pass") for one in found.values())

    def test_invalid_setting_fails_with_exit_code_1(self, tk_here, tmp_path):
        (tmp_path / "tk.toml").write_text("[serve]\nprt = 1")
        done = tk_here("doctor", cwd=tmp_path)
        assert done.returncode == 1
        [line] = [line for line in done.stdout.splitlines() if " settings " in line]
        assert line.startswith("fail")
        assert "Did you mean port" in line
        assert done.stderr.endswith("1 failed.\n")
        assert "\x1b" not in done.stdout


class TestMachine:
    """Findings from facts about other machines."""

    @pytest.mark.parametrize(
        ("facts", "gpus", "status", "says"),
        [
            (FACTS, [GPU], "pass", "on NVIDIA H200, compute capability 9.0"),
            (FACTS | {"available": False, "cuda": None}, [], "pass", "CPU only"),
            (FACTS | {"available": False, "cuda": None}, [GPU], "fail", "the machine has a GPU"),
            (FACTS | {"available": False}, [GPU], "fail", "cannot use the GPU"),
            (FACTS | {"product": "RuntimeError: CUDA error"}, [GPU], "fail", "CUDA error"),
            (
                {"error": "Illegal instruction"},
                [],
                "fail",
                "PyTorch does not run: Illegal instruction",
            ),
        ],
    )
    def test_torch(self, facts, gpus, status, says):
        finding = machine._torch(facts, gpus)
        assert finding.status == status
        assert says in finding.text
        assert bool(finding.fix) == (status == "fail")

    def test_broken_kernels_fail_on_a_gpu_and_warn_on_a_cpu(self):
        broken = {"kernels": "RuntimeError: no gcc"}
        assert machine._kernels(FACTS, [GPU]).status == "pass"
        assert machine._kernels(FACTS | broken, [GPU]).status == "fail"
        assert machine._kernels(FACTS | {"variant": "avx2"}, []).status == "pass"
        # PyTorch's operations replace the CPU kernels.
        assert machine._kernels(FACTS | broken, []).status == "warn"

    def test_missing_compiler_fails_on_a_gpu_and_warns_on_a_cpu(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        assert machine._compiler([GPU]).status == "fail"
        assert machine._compiler([]).status == "warn"

    def test_gpu_without_a_driver_fails(self, monkeypatch):
        monkeypatch.setattr(machine, "has_nvidia_gpu", lambda: True)
        finding = machine._driver([])
        assert finding.status == "fail"
        assert "--gpus all" in finding.fix
        monkeypatch.setattr(machine, "has_nvidia_gpu", lambda: False)
        assert machine._driver([]).status == "pass"

    @pytest.mark.parametrize(
        ("free", "status"), [(GIB // 2, "fail"), (5 * GIB, "warn"), (50 * GIB, "pass")]
    )
    def test_disk(self, monkeypatch, free, status):
        monkeypatch.setattr(
            machine.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free})
        )
        assert machine._disk().status == status

    @pytest.mark.parametrize(
        ("cores", "quota", "requested", "text"),
        [
            (2 * (Core(0, 0, ()),), None, None, "2 cores: on the CPU tk computes with 2 threads"),
            (
                (Core(0, 0, (0, 2)), Core(1, 1, (1, 3)), Core(1, 1, (4, 5))),
                None,
                None,
                "3 cores (6 hardware threads) on 2 processors: on the CPU tk computes with "
                "2 threads, all but the first bound to a core each",
            ),
            (
                8 * (Core(0, 0, (0,)),),
                2.5,
                None,
                "8 cores, and a control group's limit of 2.5: on the CPU tk computes with "
                "2 threads",
            ),
            (
                (Core(0, 0, (0,)),),
                None,
                3,
                "1 core: on the CPU tk computes with 3 threads (OMP_NUM_THREADS)",
            ),
        ],
    )
    def test_cores_and_planned_threads_are_described(self, cores, quota, requested, text):
        finding = machine._cores(Cores(cores, quota), requested)
        assert (finding.status, finding.text) == ("pass", text)

    def test_less_than_one_core_is_a_warning(self):
        assert machine._cores(Cores((Core(0, 0, (0,)),), 0.5), None).status == "warn"

    def test_little_memory_is_a_warning(self, monkeypatch):
        monkeypatch.setattr(
            machine, "find_device", lambda wanted: Device("cpu", "cpu", 4 * GIB, GIB)
        )
        assert machine._memory().status == "warn"


class TestInstallation:
    def test_missing_and_outdated_packages_fail(self, monkeypatch):
        real = installation.version_of
        versions = {"torch": "2.0.0", "orjson": None}
        monkeypatch.setattr(installation, "version_of", lambda name: versions.get(name, real(name)))
        finding = installation._packages()
        assert finding.status == "fail"
        assert "torch is 2.0.0, and tk needs >=2.11" in finding.text
        assert "orjson is missing" in finding.text

    def test_untested_versions_are_a_warning(self, tmp_path):
        (tmp_path / "constraints.txt").write_text("torch==1.0\nNumPy==0.1\nunrelated==3")
        finding = installation._versions(tmp_path / "constraints.txt")
        assert finding.status == "warn"
        assert "torch" in finding.text
        assert "tested: 0.1" in finding.text

    @pytest.mark.parametrize("shell", COMPLETIONS)
    def test_installed_and_outdated_completions_are_recognized(
        self, shell, tmp_path, monkeypatch, tk_here
    ):
        for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR", "BASH_COMPLETION_USER_DIR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert installation._completions(shell).status == "warn"
        assert tk_here("completion", shell, "--install", cwd=tmp_path).returncode == 0
        assert installation._completions(shell).status == "pass"
        installation.completion_path(shell).write_text("outdated")
        assert "from another version" in installation._completions(shell).text


class TestCollectEnv:
    @pytest.fixture
    def report(self, one_probe, tk_here, tmp_path):
        """The report of a machine with many private settings."""
        folder = tmp_path / "machine"
        home = folder / "home" / "ada.lovelace"
        home.mkdir(parents=True)
        (folder / "tk.toml").write_text("max_num_seqs = 7")
        secrets = {
            "TK_API_KEY": "first-private-key,second-private-key",
            "TK_ADMIN_KEY": "the-admins-own",
            "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwx",
            "TK_URL": "http://ada.lovelace:pa55word@gpu17.example.org:8000",
            "HF_HOME": str(home / "models"),
            "TK_OTLP_TRACES_ENDPOINT": "https://collector.example.org/v1/traces",
            "TK_HOST": "10.1.2.3",
            "TK_SERVED_MODEL_NAME": "sk-abcdefghijklmnopqrstuv",
        }
        user = {"HOME": str(home), "USER": "ada.lovelace", "LOGNAME": "ada.lovelace"}
        done = tk_here("collect-env", cwd=folder, TK_SYSTEM="a|b", **secrets, **user)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def test_report_has_the_facts_and_nothing_private(self, report):
        private = [
            "private-key", "the-admins-own", "abcdefgh", "ada", "lovelace", "pa55word",
            "example.org", "gpu17", "10.1.2.3", socket.gethostname(),
        ]  # fmt: skip
        public = report.replace("<host>", "").replace("<user>", "")
        assert [word for word in private if word in public] == []
        assert f"| tk | {toolkit.__version__}" in report
        assert "| torch | " in report
        assert "| max_num_seqs | `7` from " in report
        assert "| HF_HOME | `~/models` |" in report

    def test_report_is_markdown_tables_of_two_columns(self, report):
        rows = [line for line in report.splitlines() if line.startswith("|")]
        assert len(rows) > 30
        assert all(row.replace("\\|", "").count("|") == 3 for row in rows)
        titles = [line for line in report.splitlines() if line.startswith("#")]
        assert titles[:3] == ["### System", "### Device", "### Packages"]

    @pytest.mark.parametrize(
        ("text", "redacted"),
        [
            ("127.0.0.1:8000 and 0.0.0.0 stay", "127.0.0.1:8000 and 0.0.0.0 stay"),
            ("10.0.0.7 goes", "<address> goes"),
            ("fe80::1ff:fe23:4567:890a goes", "<address> goes"),
            ("https://huggingface.co/org/model", "https://huggingface.co/org/model"),
            ("http://bob:pw@inner:80/x", "http://<host>:80/x"),
            ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
            ("ghp_0123456789abcdefghij", "***"),
            ("torch 2.13.0+cpu at 12:34:56", "torch 2.13.0+cpu at 12:34:56"),
        ],
    )
    def test_redacted_texts(self, text, redacted, monkeypatch):
        monkeypatch.setattr(getpass, "getuser", lambda: "somebody")
        monkeypatch.setattr(socket, "gethostname", lambda: "somewhere")
        assert redact(text) == redacted

    def test_names_are_redacted_as_words_and_root_is_kept(self, monkeypatch):
        monkeypatch.setattr(getpass, "getuser", lambda: "ann")
        monkeypatch.setattr(socket, "gethostname", lambda: "box.lan")
        assert redact("Ann's annual, box and boxes") == "<user>'s annual, <host> and boxes"
        monkeypatch.setattr(getpass, "getuser", lambda: "root")
        monkeypatch.setenv("HOME", "/root")
        assert redact("root_path in /root/.cache") == "root_path in ~/.cache"
