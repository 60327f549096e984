"""Parsers of answers that a server's settings choose, plug-ins included."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit import plugins
from toolkit.config import ServerConfig
from toolkit.plugins import Group
from toolkit.text.reasoning import REASONING_FORMATS, Reasoning, ReasoningFormat
from toolkit.text.tokenizer import Tokenizer
from toolkit.text.tool_formats import FORMATS, ToolFormat, detect_format

_LAST = 8  # tokens at the prompt's end to search for a marker


@dataclass(frozen=True, slots=True)
class Parsers:
    """Formats of tool calls and of reasoning. None: there are none, or the format is unknown."""

    tool_format: type[ToolFormat] | None = None
    detects_tool_format: bool = True  # from the chat template
    reasoning_format: type[ReasoningFormat] | None = None

    @classmethod
    def choose(cls, config: ServerConfig, *, strict: bool = False) -> Parsers:
        """Load what the settings name.

        Raises ConfigError for an unknown name. Raises PluginError for a plug-in that is broken, if
        it is needed or `strict`; else logs it."""
        return cls(
            plugins.choose(
                config.tool_call_parser,
                "--tool-call-parser",
                Group.TOOL_PARSERS,
                FORMATS,
                ("auto", "none"),
                file=config.tool_parser_plugin,
                strict=strict,
            ),
            config.tool_call_parser == "auto",
            plugins.choose(
                config.reasoning_parser,
                "--reasoning-parser",
                Group.REASONING_PARSERS,
                REASONING_FORMATS,
                ("none",),
                file=config.reasoning_parser_plugin,
                strict=strict,
            ),
        )

    def tool_format_for(self, template: str) -> type[ToolFormat] | None:
        """Return the format of the calls that a chat template asks the model for, if known."""
        name = detect_format(template) if self.detects_tool_format else None
        return self.tool_format if name is None else FORMATS[name]

    def reasoning_after(self, prompt: list[int], tokenizer: Tokenizer) -> Reasoning | None:
        """Return how the answer begins, judged by the prompt's end; None: without reasoning."""
        if self.reasoning_format is None:
            return None
        end = tokenizer.decode(prompt[-_LAST:], skip_special_tokens=False)
        return self.reasoning_format.reasoning_after(end.rstrip())
