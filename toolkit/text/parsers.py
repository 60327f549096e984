"""Parsers of answers that a server's settings choose, plug-ins included."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit import plugins
from toolkit.config import ServerConfig
from toolkit.errors import ConfigError
from toolkit.plugins import Group
from toolkit.text.generic_tools import GenericFormat
from toolkit.text.harmony import HarmonyFormat, is_harmony
from toolkit.text.reasoning import DeepSeekR1Format, Reasoning, ReasoningFormat
from toolkit.text.tokenizer import Tokenizer
from toolkit.text.tool_formats import HermesFormat, Llama3Format, MistralFormat, ToolFormat

_LAST = 8  # tokens at the prompt's end to search for a marker
OTHERS = ("auto", "none")  # names that are no format

TOOL_FORMATS: dict[str, type[ToolFormat]] = {
    "hermes": HermesFormat,
    "llama3_json": Llama3Format,
    "mistral": MistralFormat,
    "openai": HarmonyFormat,
    "generic": GenericFormat,
}
REASONING_FORMATS: dict[str, type[ReasoningFormat | HarmonyFormat]] = {
    "qwen3": ReasoningFormat,
    "deepseek_r1": DeepSeekR1Format,
    "openai_gptoss": HarmonyFormat,
}


def detect_format(template: str) -> str | None:
    """Return the format that a chat template asks the model for, if it is a known one."""
    if is_harmony(template):
        return "openai"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template and not any(
        other in template for other in ("<function=", "<arg_key>")
    ):
        return "hermes"
    if '"parameters": dictionary of argument name' in template or "<|python_tag|>" in template:
        return "llama3_json"
    return None


@dataclass(frozen=True, slots=True)
class Parsers:
    """Formats of tool calls and of reasoning. None: there are none, or the format is unknown.

    Harmony is both: if one setting names it, the other has no effect."""

    tool_format: type[ToolFormat] | None = None
    detects_tool_format: bool = True  # from the chat template
    reasoning_format: type[ReasoningFormat] | None = None
    harmony: type[HarmonyFormat] | None = None
    detects_harmony: bool = True  # from the chat template

    @classmethod
    def choose(cls, config: ServerConfig, *, strict: bool = False) -> Parsers:
        """Load what the settings name.

        Raises ConfigError for an unknown name, and for harmony next to another format. Raises
        PluginError for a plug-in that is broken, if it is needed or `strict`; else logs it."""
        calls, thoughts = config.tool_call_parser, config.reasoning_parser
        tool_format = plugins.choose(
            calls,
            "--tool-call-parser",
            Group.TOOL_PARSERS,
            TOOL_FORMATS,
            OTHERS,
            file=config.tool_parser_plugin,
            strict=strict,
        )
        reasoning_format = plugins.choose(
            thoughts,
            "--reasoning-parser",
            Group.REASONING_PARSERS,
            REASONING_FORMATS,
            OTHERS,
            file=config.reasoning_parser_plugin,
            strict=strict,
        )
        formats = {tool_format, reasoning_format} - {None}
        if HarmonyFormat not in formats:
            detects = "auto" in (calls, thoughts) and not formats
            return cls(tool_format, calls == "auto", reasoning_format, None, detects)
        if len(formats) > 1:
            raise ConfigError(
                f"--tool-call-parser {calls} and --reasoning-parser {thoughts} exclude each other: "
                "openai and openai_gptoss are one format, of calls and reasoning.",
                param="tool_call_parser",
            )
        return cls(None, False, None, HarmonyFormat, False)

    def tool_format_for(self, template: str) -> type[ToolFormat] | None:
        """Return the format of calls with a chat template; None: --tool-call-parser is none.

        If the template asks for none that is known, it is GenericFormat."""
        if not self.detects_tool_format:
            return self.tool_format
        name = detect_format(template) if "tools" in template else None
        return TOOL_FORMATS[name or "generic"]

    def shows_tools(self, template: str) -> bool:
        """Return True if the model sees tools: in its chat template, or in the text of messages."""
        return "tools" in template or self.tool_format_for(template) is GenericFormat

    def harmony_for(self, template: str) -> type[HarmonyFormat] | None:
        """Return the format of complete answers; None: reasoning and calls have their own."""
        return HarmonyFormat if self.detects_harmony and is_harmony(template) else self.harmony

    def reasoning_after(self, prompt: list[int], tokenizer: Tokenizer) -> Reasoning | None:
        """Return how the answer begins, judged by the prompt's end; None: without reasoning."""
        if self.reasoning_format is None:
            return None
        end = tokenizer.decode(prompt[-_LAST:], skip_special_tokens=False)
        return self.reasoning_format.reasoning_after(end.rstrip())
