"""Completion scripts. All that the tree of commands knows is written into them, so that no Python starts for it; names
of models come from the hidden command `tk __values` (`cli.values`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from toolkit.cli.man import OTHERS
from toolkit.cli.names import VALUES
from tools.docs.tree import Argument, Command, Flag

MADE = "made by `make docs`"
ASKED = ("MODEL", "NAME", "DOWNLOADED")
"""Kinds of values that `tk __values` knows."""
PATHS = ("FILE", "FOLDER")


def bash(tk: Command) -> str:
    """For bash from 3.2 on, with or without the package bash-completion."""
    paths = "|".join(f'"{command.name}"' for command in tk.walk() if command is not tk)
    tables = "\n".join(_bash_table(command, tk) for command in tk.walk())
    return _filled(_BASH, paths=paths, tables=tables)


def zsh(tk: Command) -> str:
    """For zsh's completion system (compinit): a file of the name _tk in a folder of $fpath."""
    functions = "\n\n".join(_zsh_function(command, tk) for command in tk.walk())
    return _filled(_ZSH, functions=functions)


def fish(tk: Command) -> str:
    """For fish from 3.1 on."""
    paths = " ".join(_quoted(command.name) for command in tk.walk() if command is not tk)
    lines = "\n".join(line for command in tk.walk() for line in _fish_lines(command, tk))
    return _filled(_FISH, paths=paths, lines=lines)


def _filled(template: str, **parts: str) -> str:
    for name, text in {"made": MADE, "asks": VALUES, **parts}.items():
        template = template.replace(f"@{name}@", text)
    return template


def _kind(what: Flag | Argument, tk: Command) -> str:
    """How a value is found: 'a b c' when those are all, @FILE, @MODEL, @NAME, or @ANY when nobody can tell."""
    if what.choices:
        return " ".join(what.choices)
    if what.value == "COMMAND":
        words = [word for command in tk.walk() for word in command.path[1:]]
        return " ".join(dict.fromkeys([*words, *(name.removeprefix("tk-") for name in OTHERS)]))
    if what.value in PATHS:
        return "@FILE"
    return f"@{what.value}" if what.value in ASKED else "@ANY"


def _short(text: str) -> str:
    """The first sentence."""
    return re.split(r"[.;] ", text)[0].rstrip(".")


def _bash_table(command: Command, tk: Command) -> str:
    names = [name for flag in command.flags for name in (*flag.names, *flag.negations)]
    by_kind: dict[str, list[str]] = {}
    for flag in command.flags:
        if flag.value:
            by_kind.setdefault(_kind(flag, tk), []).extend(flag.names)
    kinds = "".join(
        f'\n                {"|".join(those)}) kind="{kind}" ;;' for kind, those in by_kind.items()
    )
    below = " ".join(one.path[-1] for one in command.commands)
    places = " ".join(f'"{_kind(one, tk)}"' for one in command.arguments if not one.repeatable)
    rest = [_kind(one, tk) for one in command.arguments if one.repeatable]
    lines = [f'        "{command.name}")', f'            flags="{" ".join(names)}"']
    lines += (
        [f'            places=("{below}")']
        if below
        else [f"            places=({places})"]
        if places
        else []
    )
    lines += [f'            rest="{kind}"' for kind in rest]
    lines += [f'            case "$1" in{kinds}\n            esac'] if kinds else []
    return "\n".join([*lines, "            ;;"])


def _zsh_function(command: Command, tk: Command) -> str:
    specs = [spec for flag in command.flags for spec in _zsh_flag(flag, tk)]
    if command.commands:
        listed = " ".join(
            f'{one.path[-1]}\\:"{_zsh_text(one.summary)}"' for one in command.commands
        )
        specs += [f"'1:command:(({listed}))'", "'*::argument:->below'"]
    for number, argument in enumerate(command.arguments, 1):
        place = "*" if argument.repeatable else str(number)
        specs.append(f"'{place}:{argument.value}:{_zsh_action(_kind(argument, tk))}'")
    name = "_".join(("", *command.path))
    body = "".join(f" \\\n        {spec}" for spec in specs)
    if not command.commands:
        return f"{name}() {{\n    _arguments -s{body}\n}}"
    cases = "\n".join(
        f"        {one.path[-1]}) {'_'.join(('', *one.path))} ;;" for one in command.commands
    )
    return (
        f"{name}() {{\n    local context state state_descr line\n    typeset -A opt_args\n    _arguments -C -s{body}\n"
        f'    [[ $state == below ]] || return\n    case "$words[1]" in\n{cases}\n    esac\n}}'
    )


def _zsh_flag(flag: Flag, tk: Command) -> list[str]:
    names = (*flag.names, *flag.negations)
    others = "*" if flag.repeatable else f"({' '.join(names)})" if len(names) > 1 else ""
    text = _zsh_text(_short(flag.help)).replace("[", "\\[").replace("]", "\\]")
    if not flag.value:
        return [f"'{others}{name}[{text}]'" for name in names]
    action = _zsh_action(_kind(flag, tk))
    return [f"'{others}{name}=[{text}]:{flag.value}:{action}'" for name in names]


def _zsh_action(kind: str) -> str:
    if not kind.startswith("@"):
        return f"({kind})"
    actions = {"@FILE": "_files", "@MODEL": "_tk__models"}
    actions |= {f"@{asked}": f" _tk__values {asked}" for asked in ASKED if asked != "MODEL"}
    return actions.get(kind, " ")


def _zsh_text(text: str) -> str:
    """Text within single quotes."""
    return text.replace("\\", "\\\\").replace("'", "'\\''").replace('"', "").replace(":", "\\:")


def _fish_lines(command: Command, tk: Command) -> Iterable[str]:
    yield f"\n# {command.name}"
    start = f'complete -c tk -n "__tk_at {_quoted(command.name)}"'
    for one in command.commands:
        yield f"{start} -a {one.path[-1]} -d {_quoted(one.summary)}"
    for argument in command.arguments:
        if (values := _fish_values(_kind(argument, tk))) is not None:
            yield f"{start} -a {_quoted(values)}"
    for flag in command.flags:
        text = f"-d {_quoted(_short(flag.help))}"
        names = " ".join(
            f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names
        )
        yield f"{start} {names} {_fish_value(flag, tk)}{text}"
        yield from (f"{start} -l {name[2:]} {text}" for name in flag.negations)


def _fish_value(flag: Flag, tk: Command) -> str:
    if not flag.value:
        return ""
    kind = _kind(flag, tk)
    if kind == "@FILE":
        return "-r -F "
    values = _fish_values(kind)
    return "-x " if values is None else f"-x -a {_quoted(values)} "


def _fish_values(kind: str) -> str | None:
    """What stands behind -a; None when nobody can tell the values."""
    if kind[1:] in ASKED:
        return f"(__tk_values {kind[1:]})"
    return None if kind.startswith("@") else kind


def _quoted(text: str) -> str:
    """In single quotes, as fish reads them."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_BASH = """\
# bash completion for tk; @made@. Install: tk completion bash --install

# Sets flags, places and rest (what can stand where no flag does: first, second, ...; and ever after) of the command in
# $path, and the kind of value that the flag $1 takes: words, @FILE, @MODEL, @NAME, @ANY, or nothing when it takes none.
_tk_table() {
    flags= kind= places=() rest=
    case "$path" in
@tables@
    esac
}

# The words up to the cursor as they were typed: readline parts them at colons and equals signs, too.
_tk_words() {
    local line=${COMP_LINE:0:COMP_POINT} gap word i
    line=${line#*"${COMP_WORDS[0]}"}
    words=("${COMP_WORDS[0]}")
    for ((i = 1; i <= COMP_CWORD; i++)); do
        gap=${line%%[![:space:]]*}
        line=${line#"$gap"}
        word=${COMP_WORDS[i]}
        ((i == COMP_CWORD)) && word=$line
        line=${line#"$word"}
        if [[ -n $gap ]]; then
            words+=("$word")
        else
            words[${#words[@]} - 1]+=$word
        fi
    done
}

# Offers those of the lines in $1 that begin with $cur.
_tk_offer() {
    local one
    while IFS= read -r one; do
        [[ -n $one && $one == "$cur"* ]] && COMPREPLY+=("$before$one")
    done <<<"$1"
}

_tk() {
    local words path=tk flags kind places rest flag= before= place=0 i=1 newline=$'\\n'
    COMPREPLY=()
    _tk_words
    local last=$((${#words[@]} - 1))
    local cur=${words[last]}
    while ((i < last)); do
        case "$path ${words[i]}" in
            @paths@) path+=" ${words[i]}" ;;
            *) break ;;
        esac
        ((i++))
    done
    for (( ; i < last; i++)); do
        if [[ -n $flag ]]; then
            flag=
        elif [[ ${words[i]} == -* ]]; then
            _tk_table "${words[i]}"
            [[ -n $kind ]] && flag=${words[i]}
        else
            ((place++))
        fi
    done
    if [[ -z $flag && $cur == --*=* ]]; then
        flag=${cur%%=*} before=${cur%%=*}= cur=${cur#*=}
    fi
    _tk_table "$flag"
    if [[ -z $flag && $cur == -* ]]; then
        kind=$flags
    elif [[ -z $flag ]]; then
        kind=${places[place]-$rest}
    fi
    case $kind in
        @FILE)
            compopt -o filenames 2>/dev/null
            _tk_offer "$(compgen -f -- "$cur")"
            ;;
        @MODEL | @NAME | @DOWNLOADED)
            if [[ $kind == @MODEL && $cur == [./~]* ]]; then
                compopt -o filenames 2>/dev/null
                _tk_offer "$(compgen -d -- "$cur")"
            else
                _tk_offer "$(command "${words[0]}" @asks@ "${kind#@}" "${words[@]:1:last-1}" 2>/dev/null)"
            fi
            ;;
        @ANY) ;;
        *) _tk_offer "${kind// /$newline}" ;;
    esac
    # readline replaces only what follows the last colon or equals sign
    local breaks=${COMP_WORDBREAKS//[!:=]/} typed=$before$cur
    if [[ -n $breaks && ${#COMPREPLY[@]} -gt 0 ]]; then
        typed=${typed%"${typed##*[$breaks]}"}
        COMPREPLY=("${COMPREPLY[@]#"$typed"}")
    fi
}

complete -F _tk tk
"""

_ZSH = """\
#compdef tk
# zsh completion for tk; @made@. Install: tk completion zsh --install

_tk__models() {
    if [[ $PREFIX == [./~]* ]]; then
        _files -/
        return
    fi
    _tk__values MODEL
}

# Names of the kind $1. (An action for _arguments that begins with a space is called as it stands.)
_tk__values() {
    local -a found
    found=(${(f)"$(command tk @asks@ "$1" "${(@Q)words}" 2>/dev/null)"})
    compadd -a found
}

@functions@

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _tk "$@"
else
    compdef _tk tk
fi
"""

_FISH = """\
# fish completion for tk; @made@. Install: tk completion fish --install

function __tk_at -d 'Whether the line is at this command'
    set -l words (commandline -opc)
    set -l path tk
    for word in $words[2..]
        contains -- "$path $word" @paths@; or break
        set path "$path $word"
    end
    test "$path" = "$argv[1]"
end

function __tk_values -d 'Names of models'
    set -l words (commandline -opc)
    if string match -qr '^[./~]' -- (commandline -ct)
        __fish_complete_directories
    else
        command tk @asks@ $argv[1] $words[2..] 2>/dev/null
    end
end

complete -c tk -f
@lines@
"""
