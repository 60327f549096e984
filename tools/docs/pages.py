"""The man pages: one for each command, tk.toml(5) and tk-metrics(7)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from toolkit.cli.root import EXIT_CODES
from toolkit.config.engine import MAX_GIB
from toolkit.config.fields import Option
from toolkit.config.sources import FILE_VARIABLE
from toolkit.logs import DEBUG
from tools.docs.exposed import Endpoint, Metric, endpoints, metrics
from tools.docs.prose import PROSE, SETTINGS_FILES
from tools.docs.roff import ManPage, bold, escape, italic
from tools.docs.tree import Argument, CommandNode, Flag

TYPES = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "true or false",
    tuple: "string, or list of strings",
    dict: "table",
}
LOG = (
    "$XDG_STATE_HOME/tk/errors.log, else ~/.local/state/tk/errors.log",
    "Tracebacks of internal errors. At 1 MiB it is renamed to errors.log.1.",
)


def pages(tk: CommandNode) -> dict[str, str]:
    """Return the text of every page, by file name."""
    by_name = {f"{command.page}.1": str(_command_page(command, tk)) for command in tk.walk()}
    return by_name | {"tk.toml.5": str(_settings_page(tk)), "tk-metrics.7": str(_metrics_page())}


def _command_page(command: CommandNode, tk: CommandNode) -> ManPage:
    prose = PROSE[command.page]
    page = ManPage(command.page, 1, command.summary[0].lower() + command.summary[1:])
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
            page.item(italic(argument.value), _joined(argument.help, _choices(argument.choices)))
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
            "Each setting is also an environment variable: "
            + ", ".join(bold(row.variable) for row in command.rows)
            + "."
        )
        page.text(
            "A flag overrides its variable, which overrides tk.toml. The value of a switch is true "
            "or false."
        )
        page.item(bold(FILE_VARIABLE), "Same as --config.")
    page.items((*prose.environment, (DEBUG, "1: print tracebacks of internal errors.")))
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


def _synopsis(command: CommandNode) -> str:
    arguments = (_optional(argument) for argument in command.arguments)
    return " ".join([bold(command.name), f"[{italic('OPTION')} ...]", *arguments])


def _optional(argument: Argument) -> str:
    word = italic(argument.value) + (" ..." if argument.repeatable else "")
    return word if argument.required else f"[{word}]"


def _write_options(page: ManPage, flags: Iterable[Flag]) -> None:
    """Write options by subject, without headings if there is only one subject."""
    by_subject: dict[str, list[Flag]] = {}
    for flag in flags:
        by_subject.setdefault(flag.subject, []).append(flag)
    for subject, group in by_subject.items():
        if len(by_subject) > 1:
            page.subsection(subject)
        for flag in group:
            page.item(_usage(flag), _description(flag))


def _usage(flag: Flag) -> str:
    """Return '-x, --example VALUE' in roff."""
    names = ", ".join(bold(name) for name in (*flag.names, *flag.negations))
    return f"{names} {italic(flag.value)}" if flag.value else names


def _description(flag: Flag) -> str:
    row = flag.row
    says_so = "may be repeated" in flag.help.lower()
    repeated = "May be repeated." if flag.repeatable and not says_so else ""
    return _joined(flag.help, _choices(flag.choices), *_bounds(row), repeated)


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _choices(choices: tuple[str, ...]) -> str:
    return f"One of {', '.join(choices)}." if choices else ""


def _bounds(row: Option | None) -> Iterator[str]:
    """Yield the range and the default of a setting."""
    if row is None:
        return
    bounds = (row.minimum, None if row.maximum == MAX_GIB else row.maximum)
    low, high = (f"{bound:g}" if isinstance(bound, float) else bound for bound in bounds)
    if low is not None and high is not None:
        yield f"From {low} to {high}."
    elif low is not None:
        yield f"At least {low}."
    elif high is not None:
        yield f"At most {high}."
    if row.default_suffix:
        yield f"Default: {row.default_suffix.strip(' []')}."


def _write_endpoints(page: ManPage, all_endpoints: Iterable[Endpoint]) -> None:
    page.section("ENDPOINTS")
    page.text("/docs describes requests and responses, with examples to try.")
    for endpoint in all_endpoints:
        page.item(f"{bold(', '.join(endpoint.methods))} {bold(endpoint.path)}", endpoint.summary)


def _see_also(command: CommandNode, tk: CommandNode) -> list[str]:
    near = [one for one in tk.walk() if command in one.commands or one in command.commands]
    names = [f"{one.page}(1)" for one in near]
    names += [name for name in PROSE[command.page].see_also if name not in names]
    return [*names, "tk.toml(5)"] if command.rows or command is tk else names


def _references(names: Iterable[str]) -> str:
    """Return 'tk(1), tk.toml(5)' in roff."""
    parts = [re.fullmatch(r"(.+)\((\d)\)", name) for name in names]
    return ",\n".join(f"{bold(part[1])}({part[2]})" for part in parts if part)


def _settings_page(tk: CommandNode) -> ManPage:
    page = ManPage("tk.toml", 5, "settings of tk")
    page.section("DESCRIPTION")
    page.text(
        "A TOML file of settings. tk reads one file: the one that --config or TK_CONFIG names, "
        "else tk.toml in the current folder, else the user's tk.toml. A flag overrides a TK_* "
        "variable, which overrides this file, which overrides the default.\n\n"
        "A key is the name of a flag with underscores instead of hyphens; hyphens are accepted "
        "too. A top-level key applies to every command that has the setting; the commands are "
        "listed below in brackets. A section, such as [serve] or [bench.offline], applies to one "
        "command and overrides top-level keys. An unknown key or section is an error; the message "
        "suggests the nearest name.\n\n"
        "tk config show prints all settings as such a file. With --origin it also prints where "
        "each value comes from."
    )
    page.section("SETTINGS")
    for title, settings in _settings(tk).items():
        page.subsection(title)
        for name, (row, texts) in settings.items():
            page.item(f"{bold(name)} ({escape(TYPES[row.type])})", _by_command(texts))
    page.section("EXAMPLES")
    page.code(
        'max_model_len = 512\n\n[serve]\nmodel = "gpt2"\nport = 8080\n'
        'enable_prefix_caching = false\napi_key = ["one", "two"]\n\n'
        "[bench.offline]\nnum_prompts = 64"
    )
    page.section("ENVIRONMENT")
    page.text(
        "Each key is also an environment variable: TK_ and its name in capitals, such as "
        "TK_MAX_MODEL_LEN."
    )
    page.items([(FILE_VARIABLE, "The file to read. Same as --config.")])
    page.section("EXIT STATUS")
    page.text("A command exits with 2 if the file is unreadable, or has an invalid key or value.")
    page.section("FILES")
    page.items(SETTINGS_FILES)
    page.section("SEE ALSO")
    page.paragraph(_references(f"{command.page}(1)" for command in tk.walk()))
    return page


Texts = dict[str, list[CommandNode]]
"""Descriptions of a setting, and the commands that each applies to."""


def _settings(tk: CommandNode) -> dict[str, dict[str, tuple[Option, Texts]]]:
    """Return every setting once, by subject and name."""
    found: dict[str, tuple[Option, Texts]] = {}
    by_subject: dict[str, dict[str, tuple[Option, Texts]]] = {}
    for command in tk.walk():
        for flag in command.flags:
            if flag.row is None:
                continue
            if flag.row.name not in found:
                found[flag.row.name] = (flag.row, {})
                by_subject.setdefault(flag.subject, {})[flag.row.name] = found[flag.row.name]
            found[flag.row.name][1].setdefault(_description(flag), []).append(command)
    return by_subject


def _by_command(texts: Texts) -> str:
    """Return the descriptions of a key, each with the commands that it applies to."""
    return " ".join(
        f"[{', '.join(' '.join(command.path[1:]) for command in commands)}] {text}"
        for text, commands in texts.items()
    )


def _metrics_page() -> ManPage:
    page = ManPage("tk-metrics", 7, "Prometheus metrics of a server")
    page.section("DESCRIPTION")
    page.text(
        "GET /metrics returns metrics in Prometheus' text format. After the prefix, names and "
        "meanings are vLLM's. The prefix is tk: by default; with --metrics-prefix vllm existing "
        "dashboards work. Times are in seconds, lengths in tokens.\n\n"
        "A counter only grows, and restarts at 0 with the server. A histogram NAME is exposed as "
        "NAME_bucket (counts of values up to le), NAME_sum and NAME_count. GPU metrics exist only "
        "if the model runs on a GPU."
    )
    page.section("METRICS")
    for metric in metrics():
        page.item(bold(metric.name), _metric_text(metric))
    page.section("EXAMPLES")
    page.text("Tokens per second, prefix cache hit rate of prompt tokens, 99th percentile of TTFT:")
    page.code(
        "rate(tk:generation_tokens_total[1m])\n"
        "rate(tk:prefix_cache_hits_total[5m]) / rate(tk:prefix_cache_queries_total[5m])\n"
        "histogram_quantile(0.99, sum by (le) (rate(tk:time_to_first_token_seconds_bucket[5m])))"
    )
    page.section("ENVIRONMENT")
    page.items([("TK_METRICS_PREFIX", "Same as --metrics-prefix.")])
    page.section("SEE ALSO")
    page.paragraph(_references(["tk-serve(1)", "tk-top(1)"]))
    return page


def _metric_text(metric: Metric) -> str:
    labels = f", by {', '.join(metric.labels)}" if metric.labels else ""
    return f"{metric.kind.capitalize()}{labels}. {metric.text}"
