"""The man pages: one for each command, tk.toml(5) and tk-metrics(7)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from toolkit.cli.root import EXIT_CODES
from toolkit.config.engine import MOST_GIB
from toolkit.config.fields import Option
from toolkit.config.sources import FILE_VARIABLE
from toolkit.logs import DEBUG
from tools.docs.exposed import Endpoint, Metric, endpoints, metrics
from tools.docs.prose import PROSE, SETTINGS_FILES
from tools.docs.roff import Page, bold, escape, italic
from tools.docs.tree import Argument, Command, Flag

TYPES = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "true or false",
    tuple: "string, or list of strings",
}
LOG = (
    "$XDG_STATE_HOME/tk/errors.log, else ~/.local/state/tk/errors.log",
    "Tracebacks of faults; at 1 MiB it is kept as errors.log.1, and begun anew.",
)


def pages(tk: Command) -> dict[str, str]:
    """The text of every page, by its file's name."""
    made = {f"{command.page}.1": str(_command_page(command, tk)) for command in tk.walk()}
    return made | {"tk.toml.5": str(_settings_page(tk)), "tk-metrics.7": str(_metrics_page())}


def _command_page(command: Command, tk: Command) -> Page:
    prose = PROSE[command.page]
    page = Page(command.page, 1, command.summary[0].lower() + command.summary[1:])
    page.section("SYNOPSIS")
    page.paragraph(_synopsis(command))
    if command.commands:
        page.paragraph(f"{bold(command.name)} {italic('COMMAND')} ...")
    page.section("DESCRIPTION")
    page.text(command.help)
    if command.commands:
        page.section("COMMANDS")
        page.items((one.page + "(1)", one.summary + ".") for one in command.commands)
    if command.arguments:
        page.section("ARGUMENTS")
        for argument in command.arguments:
            page.item(italic(argument.value), _said(argument.help, _choices(argument.choices)))
    page.section("OPTIONS")
    _write_options(page, command.flags)
    if command.page == "tk-serve":
        _write_endpoints(page, endpoints())
    page.section("EXAMPLES")
    for purpose, line in prose.examples:
        page.text(purpose)
        page.code(line)
    page.section("ENVIRONMENT")
    if command.rows:
        page.paragraph(
            "Each setting is also a variable: "
            + ", ".join(bold(row.variable) for row in command.rows)
            + "."
        )
        page.text("A flag beats its variable, which beats tk.toml. A switch is true or false.")
        page.item(bold(FILE_VARIABLE), "As --config.")
    page.items(
        (*prose.environment, (DEBUG, "1: a fault shows its traceback on the terminal, too."))
    )
    page.section("EXIT STATUS")
    own = dict(prose.exit_codes)
    general = {str(code): text for code, text in EXIT_CODES.items()}
    page.items(sorted((general | own).items(), key=lambda code: int(code[0].split(",")[0])))
    page.section("FILES")
    settings = SETTINGS_FILES if command.rows or command is tk else ()
    page.items((*settings, *prose.files, LOG))
    page.section("SEE ALSO")
    page.paragraph(_references(_see_also(command, tk)))
    return page


def _synopsis(command: Command) -> str:
    arguments = (_optional(argument) for argument in command.arguments)
    return " ".join([bold(command.name), f"[{italic('OPTION')} ...]", *arguments])


def _optional(argument: Argument) -> str:
    word = italic(argument.value) + (" ..." if argument.repeatable else "")
    return word if argument.required else f"[{word}]"


def _write_options(page: Page, flags: Iterable[Flag]) -> None:
    """Options by subject; a command whose options have one alone gets no headings."""
    by_subject: dict[str, list[Flag]] = {}
    for flag in flags:
        by_subject.setdefault(flag.subject, []).append(flag)
    for subject, those in by_subject.items():
        if len(by_subject) > 1:
            page.subsection(subject)
        for flag in those:
            page.item(_usage(flag), _described(flag))


def _usage(flag: Flag) -> str:
    """'-x, --example VALUE', in roff."""
    names = ", ".join(bold(name) for name in (*flag.names, *flag.negations))
    return f"{names} {italic(flag.value)}" if flag.value else names


def _described(flag: Flag) -> str:
    row = flag.row
    repeated = "" if not flag.repeatable or "may be repeated" in flag.help else "May be repeated."
    return _said(flag.help, _choices(flag.choices), *_bounds(row), repeated)


def _said(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _choices(choices: tuple[str, ...]) -> str:
    return f"One of {', '.join(choices)}." if choices else ""


def _bounds(row: Option | None) -> Iterator[str]:
    """What a setting's value may be, and what it is when nobody sets it."""
    if row is None:
        return
    bounds = (row.minimum, None if row.maximum == MOST_GIB else row.maximum)
    low, high = (None if bound is None else f"{bound:g}" for bound in bounds)
    if low is not None and high is not None:
        yield f"From {low} to {high}."
    elif low is not None:
        yield f"At least {low}."
    elif high is not None:
        yield f"At most {high}."
    if row.shown_default:
        yield f"Default: {row.shown_default.strip(' []')}."


def _write_endpoints(page: Page, those: Iterable[Endpoint]) -> None:
    page.section("ENDPOINTS")
    page.text("/docs shows what they take and answer, with examples to try.")
    for endpoint in those:
        page.item(f"{bold(', '.join(endpoint.methods))} {bold(endpoint.path)}", endpoint.summary)


def _see_also(command: Command, tk: Command) -> list[str]:
    near = [one for one in tk.walk() if command in one.commands or one in command.commands]
    names = [f"{one.page}(1)" for one in near]
    names += [name for name in PROSE[command.page].see_also if name not in names]
    return [*names, "tk.toml(5)"] if command.rows or command is tk else names


def _references(names: Iterable[str]) -> str:
    """'tk(1), tk.toml(5)', in roff."""
    parts = [re.fullmatch(r"(.+)\((\d)\)", name) for name in names]
    return ",\n".join(f"{bold(part[1])}({part[2]})" for part in parts if part)


def _settings_page(tk: Command) -> Page:
    page = Page("tk.toml", 5, "settings of tk")
    page.section("DESCRIPTION")
    page.text(
        "A TOML file of settings. tk reads the one that --config or TK_CONFIG names, else tk.toml in the folder where it "
        "runs, else the one in the user's own folder: one file, not several. A flag beats a TK_* variable, which beats "
        "this file, which beats the default.\n\n"
        "A key is a flag with underscores for hyphens (hyphens are taken too), and has one name for all commands: each "
        "takes the keys that it knows, which are said in brackets. A section is for one command alone, such as [serve] or "
        "[bench.offline], and beats the keys before it. A key or a section that no command knows is an error, which "
        "names the nearest.\n\n"
        "tk config show prints all of it as a file, and with --origin who says what."
    )
    page.section("SETTINGS")
    for title, settings in _settings(tk).items():
        page.subsection(title)
        for name, (row, texts) in settings.items():
            page.item(f"{bold(name)} ({escape(TYPES[row.type])})", _by_command(texts))
    page.section("EXAMPLES")
    page.code(
        'max_model_len = 512\n\n[serve]\nmodel = "gpt2"\nport = 8080\nenable_prefix_caching = false\n'
        'api_key = ["one", "two"]\n\n[bench.offline]\nnum_prompts = 64'
    )
    page.section("ENVIRONMENT")
    page.text(
        "Each key is also a variable: TK_ and its name in capitals, such as TK_MAX_MODEL_LEN."
    )
    page.items([(FILE_VARIABLE, "The file to read, as --config.")])
    page.section("EXIT STATUS")
    page.text(
        "A file that cannot be read, and a key or a value that is wrong, end a command with 2."
    )
    page.section("FILES")
    page.items(SETTINGS_FILES)
    page.section("SEE ALSO")
    page.paragraph(_references(f"{command.page}(1)" for command in tk.walk()))
    return page


Texts = dict[str, list[Command]]
"""What is said of a setting, and of which commands."""


def _settings(tk: Command) -> dict[str, dict[str, tuple[Option, Texts]]]:
    """Every setting once, by its first subject and its name."""
    found: dict[str, tuple[Option, Texts]] = {}
    by_subject: dict[str, dict[str, tuple[Option, Texts]]] = {}
    for command in tk.walk():
        for flag in command.flags:
            if flag.row is None:
                continue
            if flag.row.name not in found:
                found[flag.row.name] = (flag.row, {})
                by_subject.setdefault(flag.subject, {})[flag.row.name] = found[flag.row.name]
            found[flag.row.name][1].setdefault(_described(flag), []).append(command)
    return by_subject


def _by_command(texts: Texts) -> str:
    """What a key means to each of the commands that take it."""
    return " ".join(
        f"[{', '.join(' '.join(command.path[1:]) for command in commands)}] {text}"
        for text, commands in texts.items()
    )


def _metrics_page() -> Page:
    page = Page("tk-metrics", 7, "what a server tells Prometheus")
    page.section("DESCRIPTION")
    page.text(
        "GET /metrics answers in Prometheus' text format. Names and meanings are vLLM's after the prefix, which is tk: "
        "unless --metrics-prefix says otherwise; --metrics-prefix vllm fits existing dashboards. Times are in seconds, "
        "lengths in tokens.\n\n"
        "A counter only grows, and starts again at 0 with the server. A histogram NAME is exposed as NAME_bucket "
        "(counts of values up to le), NAME_sum and NAME_count. Metrics of GPUs are there where the model runs on one."
    )
    page.section("METRICS")
    for metric in metrics():
        page.item(bold(metric.name), _metric_text(metric))
    page.section("EXAMPLES")
    page.text(
        "Tokens per second, the share of prompt tokens found in the prefix cache, the 99th percentile of TTFT:"
    )
    page.code(
        "rate(tk:generation_tokens_total[1m])\n"
        "rate(tk:prefix_cache_hits_total[5m]) / rate(tk:prefix_cache_queries_total[5m])\n"
        "histogram_quantile(0.99, sum by (le) (rate(tk:time_to_first_token_seconds_bucket[5m])))"
    )
    page.section("ENVIRONMENT")
    page.items([("TK_METRICS_PREFIX", "As --metrics-prefix.")])
    page.section("SEE ALSO")
    page.paragraph(_references(["tk-serve(1)", "tk-top(1)"]))
    return page


def _metric_text(metric: Metric) -> str:
    labels = f", by {', '.join(metric.labels)}" if metric.labels else ""
    return f"{metric.kind.capitalize()}{labels}. {metric.text}"
