"""Hand-written parts of the man pages: examples, files, other variables, special exit codes."""

from __future__ import annotations

from dataclasses import dataclass

HUB = (
    ("HF_TOKEN", "Token for gated and private models of the Hugging Face hub."),
    ("HF_HOME, HF_HUB_CACHE", "Folder of downloaded models. Default: ~/.cache/huggingface."),
    ("HF_HUB_OFFLINE", "1: use downloaded models only."),
)
ENDPOINT = ("HF_ENDPOINT", "Address of the hub. Default: https://huggingface.co.")
SETTINGS_FILES = (
    (
        "./tk.toml",
        "Settings in the current folder, unless --config or TK_CONFIG names another file.",
    ),
    (
        "$XDG_CONFIG_HOME/tk/tk.toml, else ~/.config/tk/tk.toml",
        "Settings of the user, if there is no tk.toml in the current folder.",
    ),
)
COLOR = (("NO_COLOR", "If set, output has no color."),)
PAGER = (("MANPAGER, PAGER", "Program that displays the page on a terminal."),)


@dataclass(frozen=True, slots=True)
class Prose:
    """Parts of one command's page. `examples`: (purpose, command lines)."""

    examples: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    exit_codes: tuple[tuple[str, str], ...] = ()
    see_also: tuple[str, ...] = ()


ENGINE = ("tk-serve(1)", "tk-run(1)")
RECORDS = (
    (
        "$XDG_RUNTIME_DIR/tk, else /run/user/UID/tk, else /tmp/tk-run-UID",
        "Records of the user's running servers, by which other commands find them.",
    ),
)
SERVER_LOGS = (
    (
        "$XDG_STATE_HOME/tk/servers, else ~/.local/state/tk/servers",
        "Logs of the last 20 servers that --detach started.",
    ),
)
RESULTS = (
    (
        "NAME.json",
        "With --save-result: the result. Keys ending in _s are seconds, those in _ci 95 % "
        "confidence intervals, null at an open end. A missing value is null.",
    ),
    (
        "NAME.jsonl",
        "With --save-result: a line of JSON for each request, with its timestamps and gaps.",
    ),
    ("NAME.html", "With --save-result: a self-contained report with plots."),
)
LOADED = (
    (
        "1",
        "No request succeeded, or the benchmark client, not the server, was the bottleneck "
        "(CLIENT SATURATED).",
    ),
    ("130", "Ctrl-C. The measurements up to then have been reported."),
)

PROSE = {
    "tk": Prose(
        examples=(
            ("Serve the demo model, and chat with it in another terminal:", "tk serve\ntk chat"),
            ("Read the man page of a command:", "tk man bench offline"),
        ),
        environment=COLOR,
    ),
    "tk-serve": Prose(
        examples=(
            (
                "Serve a model from the hub, with a shorter context than its maximum:",
                "tk serve gpt2 --max-model-len 512",
            ),
            (
                "Check whether a model fits, without loading or downloading it:",
                "tk serve ./model --dry-run",
            ),
            (
                "Open the server to the network, with API keys and TLS:",
                "tk serve ./model --host 0.0.0.0 --api-key-file keys.txt --ssl-keyfile key.pem "
                "--ssl-certfile cert.pem",
            ),
            ("Use variables for settings:", "TK_MODEL=gpt2 TK_MAX_MODEL_LEN=512 tk serve"),
        ),
        environment=(
            *HUB,
            *COLOR,
            (
                "NOTIFY_SOCKET",
                "Set by systemd for services of Type=notify. The server notifies it of readiness "
                "and shutdown.",
            ),
        ),
        files=(*RECORDS, *SERVER_LOGS),
        exit_codes=(
            ("0", "The server drained after SIGTERM or Ctrl-C. With --dry-run: the model fits."),
            ("1", "The model does not fit into memory, or internal error."),
            ("130", "Ctrl-C during startup."),
        ),
        see_also=("tk-ps(1)", "tk-stop(1)", "tk-metrics(7)", "tk-doctor(1)", "tk-config-show(1)"),
    ),
    "tk-ps": Prose(
        examples=(("List running servers:", "tk ps"), ("The same as JSON:", "tk ps --json")),
        environment=COLOR,
        files=RECORDS,
        see_also=("tk-serve(1)", "tk-stop(1)", "tk-logs(1)"),
    ),
    "tk-stop": Prose(
        examples=(
            ("Stop the only server:", "tk stop"),
            ("Stop the server of a model, or on a port:", "tk stop gpt2\ntk stop 8000"),
            ("Stop all servers:", "tk stop --all"),
        ),
        files=RECORDS,
        exit_codes=(("130", "Ctrl-C. Servers that were asked to stop go on with that."),),
        see_also=("tk-serve(1)", "tk-ps(1)"),
    ),
    "tk-logs": Prose(
        examples=(("Print the log of a server:", "tk logs gpt2"),),
        files=SERVER_LOGS,
        exit_codes=(("130", "Ctrl-C."),),
        see_also=("tk-serve(1)", "tk-ps(1)"),
    ),
    "tk-chat": Prose(
        examples=(
            ("Chat with the local server, else with the demo model:", "tk chat"),
            (
                "Chat with another server:",
                "tk chat --url http://127.0.0.1:8000 --system 'Be brief.'",
            ),
            (
                "Ask about piped input. Only the answer goes to stdout:",
                "date | tk chat 'Which weekday is this?'",
            ),
            ("Print the answer, its tokens and times as JSON:", "tk chat --json 'What is TTFT?'"),
            (
                "Get an answer that matches a JSON schema:",
                """tk chat --schema <(echo '{"type": "boolean"}') 'Is a KV cache a cache?'""",
            ),
        ),
        environment=(
            *HUB,
            *COLOR,
            ("VISUAL, EDITOR", "Editor that Ctrl-X Ctrl-E opens for the question."),
        ),
        files=(
            (
                "$XDG_STATE_HOME/tk, else ~/.local/state/tk",
                "History of questions, and the log of a private server.",
            ),
            (
                "$XDG_DATA_HOME/tk/chats, else ~/.local/share/tk/chats",
                "Conversations, one JSON file each, for --continue and /load. One-shot questions "
                "are not saved.",
            ),
        ),
        exit_codes=(
            (
                "1",
                "The answer was interrupted or, with --schema, truncated; the part received has "
                "been written. Or an internal error.",
            ),
            ("130", "Ctrl-C; in a conversation, twice within a second."),
            ("129, 143", "SIGHUP or SIGTERM. A private server has been stopped."),
        ),
        see_also=ENGINE,
    ),
    "tk-run": Prose(
        examples=(
            ("Continue a prompt:", "tk run gpt2 'The sea is' --raw --max-tokens 20"),
            ("Add piped input to the prompt:", "cat notes.txt | tk run ./model 'Sum this up:'"),
            ("Ask the demo model:", "tk run --prompt 'What is a KV cache?'"),
        ),
        environment=HUB,
        see_also=("tk-chat(1)",),
    ),
    "tk-transcribe": Prose(
        examples=(
            ("Print the text of a file:", "tk transcribe talk.wav"),
            (
                "Write subtitles of several files:",
                "tk transcribe talk.wav call.wav --format srt --output subtitles",
            ),
            ("Translate German into English:", "tk transcribe call.wav --translate -l de"),
        ),
        environment=(*HUB, *COLOR),
        exit_codes=(
            ("1", "A file could not be transcribed; the others were. Or an internal error."),
            ("129, 143", "SIGHUP or SIGTERM. A private server has been stopped."),
        ),
        see_also=("tk-serve(1)",),
    ),
    "tk-bench": Prose(
        examples=(
            (
                "50 requests per second with random arrivals, for 10 seconds:",
                "tk bench --rps 50 --duration 10",
            ),
            (
                "16 concurrent requests, result as JSON:",
                "tk bench --max-concurrency 16 --num-prompts 64 --json",
            ),
            (
                "Latency objectives, and a report with plots in ./results:",
                "tk bench --rps 5 --num-prompts 20 --goodput ttft:200 tpot:50 --result-dir results",
            ),
            (
                "The highest rate that meets the objectives:",
                "tk bench --find-max-rps --goodput ttft:200 tpot:50",
            ),
            (
                "Replay a trace with its own arrival times:",
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
                "With vLLM's flags:",
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
                "One, two and four concurrent requests:",
                "tk bench sweep --vary max-concurrency=1,2,4 --num-prompts 12",
            ),
            (
                "Two rates, each with two output lengths:",
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
            ("Compare before and after a change:", "tk bench compare before.json after.json"),
            (
                "In a script, fail only on regressions of more than 10 %:",
                "tk bench compare before.json after.json --threshold 10",
            ),
        ),
        environment=COLOR,
        exit_codes=(("1", "A significant regression beyond --threshold."),),
        see_also=("tk-bench-sweep(1)",),
    ),
    "tk-bench-offline": Prose(
        examples=(
            ("Throughput of a model:", "tk bench offline gpt2 --num-prompts 64"),
            (
                "With random weights; only config.json is read:",
                "tk bench offline ./model --load-format dummy",
            ),
        ),
        environment=HUB,
        see_also=ENGINE,
    ),
    "tk-bench-throughput": Prose(
        examples=(
            (
                "Prompts and answers of 128 tokens, at most 64 of them at once:",
                "tk bench throughput gpt2 --input-len 128 --output-len 128 --max-num-seqs 64",
            ),
            (
                "With random weights; only config.json is read:",
                "tk bench throughput ./model --load-format dummy",
            ),
        ),
        environment=HUB,
        see_also=ENGINE,
    ),
    "tk-bench-latency": Prose(
        examples=(
            ("Batches of one and of eight requests:", "tk bench latency gpt2 --batch-sizes 1,8"),
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
            ("Watch the local server:", "tk top"),
            (
                "Watch several servers together; the fourth page shows each one:",
                "tk top 127.0.0.1:8000 127.0.0.1:8001",
            ),
            ("Print one snapshot, as text or as JSON:", "tk top --once\ntk top --json"),
            ("Show a demo without a server:", "tk top --demo"),
            (
                "Record, and replay at ten times the speed:",
                "tk top --record seen.jsonl && tk top --replay seen.jsonl --interval 0.1",
            ),
        ),
        environment=(
            *COLOR,
            ("COLORFGBG", "Used to find the background color, if the terminal does not report it."),
            ("TERM", "dumb: print one plain snapshot, as if the output were not a terminal."),
        ),
        see_also=("tk-serve(1)", "tk-metrics(7)"),
    ),
    "tk-models": Prose(
        examples=(
            ("List models in the current folder and downloaded ones:", "tk models"),
            ("The same as JSON:", "tk models --json"),
            ("Models in another folder:", "tk models ~/models"),
        ),
        environment=(*HUB, *COLOR),
        see_also=("tk-show(1)", "tk-pull(1)", "tk-rm(1)", "tk-serve(1)"),
    ),
    "tk-pull": Prose(
        examples=(("Download a model, so that it can be served offline:", "tk pull gpt2"),),
        environment=(*HUB, ENDPOINT),
        files=(("~/.cache/huggingface/hub", "Downloaded models."),),
        see_also=("tk-models(1)", "tk-rm(1)", "tk-serve(1)"),
    ),
    "tk-show": Prose(
        examples=(
            ("Describe the demo model:", "tk show"),
            ("Describe a model on the hub before downloading it:", "tk show gpt2"),
            ("Print all details as JSON:", "tk show ./model --json"),
        ),
        environment=(*HUB, ENDPOINT, *COLOR),
        see_also=("tk-models(1)", "tk-serve(1)"),
    ),
    "tk-rm": Prose(
        examples=(("Remove a model without confirmation:", "tk rm gpt2 --yes"),),
        environment=HUB,
        files=(("~/.cache/huggingface/hub", "The only folder that models are removed from."),),
        exit_codes=(("1", "The removal was not confirmed, or an internal error."),),
        see_also=("tk-models(1)", "tk-pull(1)"),
    ),
    "tk-config": Prose(
        examples=(("Show the settings of tk serve:", "tk config show --command serve"),),
        see_also=("tk.toml(5)",),
    ),
    "tk-config-show": Prose(
        examples=(
            (
                "Show the settings of tk serve, and where each comes from:",
                "tk config show --command serve --origin",
            ),
            (
                "The same with one of its flags:",
                "tk config show --command serve --origin --port 9000",
            ),
            ("Print all settings of all commands, as a template for tk.toml:", "tk config show"),
        ),
        environment=(
            ("TK_CONFIG", "Settings file, like --config of other commands."),
            ("TK_*", "Settings. See tk.toml(5)."),
        ),
        files=SETTINGS_FILES,
        see_also=("tk.toml(5)",),
    ),
    "tk-doctor": Prose(
        examples=(("Check this machine:", "tk doctor"),),
        environment=(*HUB, *COLOR),
        exit_codes=(("1", "A check failed, or an internal error."),),
        see_also=("tk-collect-env(1)", "tk-serve(1)"),
    ),
    "tk-verify": Prose(
        examples=(
            ("Verify a model as it would be served:", "tk verify gpt2"),
            ("With 8-bit weights, as JSON:", "tk verify gpt2 --quantization int8 --json"),
        ),
        environment=(*HUB, *COLOR),
        exit_codes=(
            (
                "1",
                "A comparison differs, the model does not fit into memory, or internal error.",
            ),
        ),
        see_also=("tk-doctor(1)", "tk-serve(1)"),
    ),
    "tk-collect-env": Prose(
        examples=(("Print the environment for a bug report:", "tk collect-env"),),
        environment=(("TK_*, HF_*, CUDA_*, OMP_*, ...", "Included, with keys redacted."),),
        see_also=("tk-doctor(1)",),
    ),
    "tk-man": Prose(
        examples=(
            ("The page of tk serve:", "tk man serve"),
            (
                "The pages of the configuration file and of the metrics:",
                "tk man tk.toml\ntk man metrics",
            ),
        ),
        environment=PAGER,
        files=(("share/man of the installation, or man/ of a checkout", "Man pages."),),
        see_also=("man(1)",),
    ),
    "tk-completion": Prose(
        examples=(
            ("Enable completion in this bash only:", "source <(tk completion bash)"),
            ("Install it for fish:", "tk completion fish --install"),
        ),
        environment=(
            (
                "BASH_COMPLETION_USER_DIR, XDG_DATA_HOME",
                "Folders in which bash looks for the user's completions.",
            ),
            ("ZDOTDIR", "Folder of zsh's files. Default: the home folder."),
            ("XDG_CONFIG_HOME", "Folder of fish's files. Default: ~/.config."),
        ),
        files=(
            ("~/.local/share/bash-completion/completions/tk", "Completions for bash."),
            ("~/.zfunc/_tk", "Completions for zsh."),
            ("~/.config/fish/completions/tk.fish", "Completions for fish."),
        ),
        see_also=("bash(1)", "zsh(1)", "fish(1)"),
    ),
}
"""Prose by the name of the page."""
