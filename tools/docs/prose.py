"""What a man page says that no table knows: examples, files, variables of others, exit codes of one command alone."""

from __future__ import annotations

from dataclasses import dataclass

HUB = (
    ("HF_TOKEN", "Token for gated and private models of the Hugging Face hub."),
    ("HF_HOME, HF_HUB_CACHE", "Where downloaded models are kept. Default: ~/.cache/huggingface."),
    ("HF_HUB_OFFLINE", "1: use downloaded models only."),
)
ENDPOINT = ("HF_ENDPOINT", "The hub's address. Default: https://huggingface.co.")
SETTINGS_FILES = (
    (
        "./tk.toml",
        "Settings, in the folder where a command runs, unless --config or TK_CONFIG names another file.",
    ),
    (
        "$XDG_CONFIG_HOME/tk/tk.toml, else ~/.config/tk/tk.toml",
        "Settings, when that folder has none.",
    ),
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
RESULTS = (
    (
        "NAME.json",
        "With --save-result: the result. Keys that end in _s are seconds, those in _ci an interval of 95 % confidence, "
        "null at an open end. What there is none of is null.",
    ),
    (
        "NAME.jsonl",
        "With --save-result: a line of JSON for each request, with its moments and gaps.",
    ),
    ("NAME.html", "With --save-result: a report with plots, which needs nothing from the network."),
)
LOADED = (
    (
        "1",
        "No request succeeded, or this program, not the server, was the bottleneck (CLIENT SATURATED).",
    ),
    ("130", "Ctrl-C. What had been measured until then has been reported."),
)

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
                "See whether a model fits, without loading or fetching it:",
                "tk serve ./model --dry-run",
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
        exit_codes=(
            ("0", "It has drained after SIGTERM or Ctrl-C; with --dry-run, the model fits."),
            ("1", "With --dry-run: the model does not fit. Otherwise a fault of tk."),
            ("130", "Ctrl-C while it was starting."),
        ),
        see_also=("tk-metrics(7)", "tk-doctor(1)", "tk-config-show(1)"),
    ),
    "tk-chat": Prose(
        examples=(
            ("Talk to the server that runs here, else to the demo model:", "tk chat"),
            (
                "Talk to a server elsewhere:",
                "tk chat --url http://127.0.0.1:8000 --system 'Be brief.'",
            ),
            (
                "A question about what comes through a pipe; the answer alone goes to stdout:",
                "date | tk chat 'Which weekday is this?'",
            ),
            ("The answer with its tokens and times, as JSON:", "tk chat --json 'What is TTFT?'"),
            (
                "An answer that fits a JSON schema:",
                """tk chat --schema <(echo '{"type": "boolean"}') 'Is a KV cache a cache?'""",
            ),
        ),
        environment=(
            *HUB,
            *COLOR,
            ("VISUAL, EDITOR", "What Ctrl-X Ctrl-E opens to write a question in."),
        ),
        files=(
            (
                "$XDG_STATE_HOME/tk, else ~/.local/state/tk",
                "Questions asked before, and the log of a private server.",
            ),
            (
                "$XDG_DATA_HOME/tk/chats, else ~/.local/share/tk/chats",
                "Conversations, each a JSON file: for --continue and /load. What is asked once is not kept.",
            ),
        ),
        exit_codes=(
            (
                "1",
                "The answer broke off or, with --schema, was cut; what came of it has been written. Or a fault of tk.",
            ),
            ("130", "Ctrl-C; in a conversation, twice within a second."),
            ("129, 143", "SIGHUP or SIGTERM; a private server has been stopped."),
        ),
        see_also=ENGINE,
    ),
    "tk-run": Prose(
        examples=(
            ("One answer:", "tk run gpt2 'The sea is' --raw --max-tokens 20"),
            (
                "What comes through a pipe joins the prompt:",
                "cat notes.txt | tk run ./model 'Sum this up:'",
            ),
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
            (
                "With an objective, and a report with plots in ./results:",
                "tk bench --rps 5 --num-prompts 20 --goodput ttft:200 tpot:50 --result-dir results",
            ),
            (
                "The highest rate that keeps it:",
                "tk bench --find-max-rps --goodput ttft:200 tpot:50",
            ),
            (
                "A recorded trace, at its own times:",
                "tk bench --dataset-name trace --dataset-path trace.jsonl",
            ),
        ),
        environment=COLOR,
        files=RESULTS,
        exit_codes=LOADED,
        see_also=("tk-serve(1)", "tk-top(1)"),
    ),
    "tk-bench-serve": Prose(
        examples=(
            (
                "As vLLM's users write it:",
                "tk bench serve --request-rate 5 --num-prompts 20 --burstiness 2",
            ),
        ),
        environment=COLOR,
        files=RESULTS,
        exit_codes=LOADED,
        see_also=("tk-serve(1)", "tk-top(1)"),
    ),
    "tk-bench-sweep": Prose(
        examples=(
            (
                "From one request at a time to four:",
                "tk bench sweep --vary max-concurrency=1,2,4 --num-prompts 12",
            ),
            (
                "Two rates with two lengths of answers:",
                "tk bench sweep --vary rps=2,4 random-output-len=8,16 --num-prompts 8",
            ),
        ),
        environment=COLOR,
        files=RESULTS,
        exit_codes=LOADED,
        see_also=("tk-bench-compare(1)",),
    ),
    "tk-bench-compare": Prose(
        examples=(
            ("Before and after a change:", "tk bench compare before.json after.json"),
            (
                "For a script that only minds ten per cent:",
                "tk bench compare before.json after.json --threshold 10",
            ),
        ),
        environment=COLOR,
        exit_codes=(("1", "Something is worse beyond --threshold, and not by chance."),),
        see_also=("tk-bench-sweep(1)",),
    ),
    "tk-bench-offline": Prose(
        examples=(
            ("The throughput of a model:", "tk bench offline gpt2 --num-prompts 64"),
            (
                "Of its shape alone, without weights:",
                "tk bench offline ./model --load-format dummy",
            ),
        ),
        environment=HUB,
        see_also=ENGINE,
    ),
    "tk-bench-latency": Prose(
        examples=(
            ("One request at a time, and eight:", "tk bench latency gpt2 --batch-sizes 1,8"),
        ),
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
            (
                "Several servers together, each alone on the fourth page:",
                "tk top 127.0.0.1:8000 127.0.0.1:8001",
            ),
            ("Look once, for people and for scripts:", "tk top --once\ntk top --json"),
            ("See what it can show, without a server:", "tk top --demo"),
            (
                "Keep what is seen, and see it again at ten times the pace:",
                "tk top --record seen.jsonl && tk top --replay seen.jsonl --interval 0.1",
            ),
        ),
        environment=(
            *COLOR,
            (
                "COLORFGBG",
                "Whether the background is light, where the terminal itself does not tell.",
            ),
            ("TERM", "dumb: one plain snapshot, as when the output is not a terminal."),
        ),
        see_also=("tk-serve(1)", "tk-metrics(7)"),
    ),
    "tk-models": Prose(
        examples=(
            ("What is here, and what was downloaded:", "tk models"),
            ("The same for a program:", "tk models --json"),
            ("Models in a folder of your own:", "tk models ~/models"),
        ),
        environment=(*HUB, *COLOR),
        see_also=("tk-show(1)", "tk-pull(1)", "tk-rm(1)", "tk-serve(1)"),
    ),
    "tk-pull": Prose(
        examples=(
            ("Fetch a model; from then on it can be served without the hub:", "tk pull gpt2"),
        ),
        environment=(*HUB, ENDPOINT),
        files=(("~/.cache/huggingface/hub", "The models."),),
        see_also=("tk-models(1)", "tk-rm(1)", "tk-serve(1)"),
    ),
    "tk-show": Prose(
        examples=(
            ("The demo model:", "tk show"),
            ("A model that is not downloaded yet:", "tk show gpt2"),
            ("All of it, for a script:", "tk show ./model --json"),
        ),
        environment=(*HUB, ENDPOINT, *COLOR),
        see_also=("tk-models(1)", "tk-serve(1)"),
    ),
    "tk-rm": Prose(
        examples=(("Remove a model without being asked:", "tk rm gpt2 --yes"),),
        environment=HUB,
        files=(("~/.cache/huggingface/hub", "Where it removes models, and from nowhere else."),),
        exit_codes=(("1", "The answer to its question was no, or a fault of tk."),),
        see_also=("tk-models(1)", "tk-pull(1)"),
    ),
    "tk-config": Prose(
        examples=(("What tk serve would run with here:", "tk config show --command serve"),),
        see_also=("tk.toml(5)",),
    ),
    "tk-config-show": Prose(
        examples=(
            (
                "What tk serve would run with here, and who says so:",
                "tk config show --command serve --origin",
            ),
            ("The same with a flag of it:", "tk config show --command serve --origin --port 9000"),
            ("All settings of all commands, as a file to begin with:", "tk config show"),
        ),
        environment=(
            ("TK_CONFIG", "The file of settings, as --config of other commands."),
            ("TK_*", "Settings: see tk.toml(5)."),
        ),
        files=SETTINGS_FILES,
        see_also=("tk.toml(5)",),
    ),
    "tk-doctor": Prose(
        examples=(("Look at this machine:", "tk doctor"),),
        environment=(*HUB, *COLOR),
        exit_codes=(("1", "A check failed, or a fault of tk."),),
        see_also=("tk-collect-env(1)", "tk-serve(1)"),
    ),
    "tk-collect-env": Prose(
        examples=(("What to attach to a report:", "tk collect-env"),),
        environment=(("TK_*, HF_*, CUDA_*, OMP_*, ...", "Told, without those that hold keys."),),
        see_also=("tk-doctor(1)",),
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
            (
                "BASH_COMPLETION_USER_DIR, XDG_DATA_HOME",
                "Where bash looks for completions of a user.",
            ),
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
