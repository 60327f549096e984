"""What a man page says that no table knows: examples, files, variables of others, exit codes of one command alone."""

from __future__ import annotations

from dataclasses import dataclass

HUB = (
    ("HF_TOKEN", "Token for gated and private models of the Hugging Face hub."),
    ("HF_HOME, HF_HUB_CACHE", "Where downloaded models are kept. Default: ~/.cache/huggingface."),
    ("HF_HUB_OFFLINE", "1: use downloaded models only."),
)
COLOR = (("NO_COLOR", "When set, nothing is written in color."),)
PAGER = (("MANPAGER, PAGER", "What shows the page, on a terminal."),)


@dataclass(frozen=True, slots=True)
class Prose:
    """Of one command. `examples` are (what for, command line)."""

    examples: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    exit_codes: tuple[tuple[str, str], ...] = ()
    see_also: tuple[str, ...] = ()


ENGINE = ("tk-serve(1)", "tk-run(1)")

PROSE = {
    "tk": Prose(
        examples=(
            ("Serve the demo model, and talk to it from another terminal:", "tk serve\ntk chat"),
            ("Read the page of one command:", "tk man bench offline"),
        ),
        environment=COLOR,
    ),
    "tk-serve": Prose(
        examples=(
            (
                "Serve a model of the hub, with a shorter context than its own:",
                "tk serve gpt2 --max-model-len 512",
            ),
            (
                "Open the server to the network, with keys, over TLS:",
                "tk serve ./model --host 0.0.0.0 --api-key-file keys.txt --ssl-keyfile key.pem --ssl-certfile cert.pem",
            ),
            ("The same settings as variables:", "TK_MODEL=gpt2 TK_MAX_MODEL_LEN=512 tk serve"),
        ),
        environment=(
            *HUB,
            *COLOR,
            (
                "NOTIFY_SOCKET",
                "Set by systemd for services of Type=notify, which are told of readiness and end.",
            ),
        ),
        exit_codes=(("0", "It has drained after SIGTERM or Ctrl-C."),),
        see_also=("tk-metrics(7)",),
    ),
    "tk-chat": Prose(
        examples=(
            ("Talk to the server that runs here, else to the demo model:", "tk chat"),
            ("Talk to a server elsewhere:", "tk chat --url http://127.0.0.1:8000 --system 'Be brief.'"),
            (
                "One message through a pipe; the answer alone goes to stdout:",
                "echo 'What is a KV cache?' | tk chat",
            ),
        ),
        environment=(*HUB, *COLOR),
        files=(
            (
                "$XDG_STATE_HOME/tk, else ~/.local/state/tk",
                "Questions asked before, and the log of a private server.",
            ),
        ),
        exit_codes=(("129, 143", "SIGHUP or SIGTERM while a private server ran; it has been stopped."),),
        see_also=ENGINE,
    ),
    "tk-run": Prose(
        examples=(
            ("One answer:", "tk run gpt2 'The sea is' --raw --max-tokens 20"),
            ("What comes through a pipe joins the prompt:", "cat notes.txt | tk run ./model 'Sum this up:'"),
            ("With the demo model:", "tk run --prompt 'What is a KV cache?'"),
        ),
        environment=HUB,
        see_also=("tk-chat(1)",),
    ),
    "tk-bench": Prose(
        examples=(
            (
                "Fifty requests per second, arriving at random, for ten seconds:",
                "tk bench --rps 50 --duration 10",
            ),
            (
                "Sixteen at a time, as JSON:",
                "tk bench --max-concurrency 16 --num-prompts 64 --json",
            ),
        ),
        environment=COLOR,
        exit_codes=(
            ("1", "No request succeeded, or this program, not the server, was the bottleneck."),
            ("130", "Ctrl-C. What had been measured until then has been reported."),
        ),
        see_also=("tk-serve(1)", "tk-top(1)"),
    ),
    "tk-bench-offline": Prose(
        examples=(
            ("The throughput of a model:", "tk bench offline gpt2 --num-prompts 64"),
            ("Of its shape alone, without weights:", "tk bench offline ./model --load-format dummy"),
        ),
        environment=HUB,
        see_also=ENGINE,
    ),
    "tk-bench-latency": Prose(
        examples=(("One request at a time, and eight:", "tk bench latency gpt2 --batch-sizes 1,8"),),
        environment=HUB,
        see_also=ENGINE,
    ),
    "tk-bench-prefill": Prose(
        examples=(("Prompts of 512 tokens:", "tk bench prefill gpt2 --input-len 512"),),
        environment=HUB,
        see_also=ENGINE,
    ),
    "tk-top": Prose(
        examples=(
            ("Watch the server that runs here:", "tk top"),
            ("Look once, for a script:", "tk top --url 127.0.0.1:8000 --once"),
        ),
        environment=COLOR,
        see_also=("tk-serve(1)", "tk-metrics(7)"),
    ),
    "tk-man": Prose(
        examples=(
            ("The page of tk serve:", "tk man serve"),
            ("Of the configuration file, and of the metrics:", "tk man tk.toml\ntk man metrics"),
        ),
        environment=PAGER,
        files=(("share/man of the installation, or man/ of a checkout", "The pages."),),
        see_also=("man(1)",),
    ),
    "tk-completion": Prose(
        examples=(
            ("In this bash only:", "source <(tk completion bash)"),
            ("In every fish:", "tk completion fish --install"),
        ),
        environment=(
            ("BASH_COMPLETION_USER_DIR, XDG_DATA_HOME", "Where bash looks for completions of a user."),
            ("ZDOTDIR", "Where zsh's files are, instead of the home folder."),
            ("XDG_CONFIG_HOME", "Where fish's files are, instead of ~/.config."),
        ),
        files=(
            ("~/.local/share/bash-completion/completions/tk", "bash's, with --install."),
            ("~/.zfunc/_tk", "zsh's."),
            ("~/.config/fish/completions/tk.fish", "fish's."),
        ),
        see_also=("bash(1)", "zsh(1)", "fish(1)"),
    ),
}
"""By the name of the page."""
