"""A format of tool calls: lines such as `@name {"argument": 1}`."""

import json
from collections.abc import Sequence

from toolkit.text.tool_formats import MAX_PARALLEL, Steps, ToolFormat, ToolSpec


class AtFormat(ToolFormat):
    @classmethod
    def grammar(cls, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        more = f' ("\\n" call){{0,{MAX_PARALLEL - 1}}}' if parallel else ""
        rules = [f"calls: call{more}", "call: " + " | ".join(f"t{i}" for i in range(len(tools)))]
        for i, tool in enumerate(tools):
            schema = tool.function.parameters or {"type": "object", "additionalProperties": False}
            head = json.dumps(f"@{tool.function.name} ")
            rules.append(f"t{i}: {head} %json {json.dumps(schema)}")
        return "\n".join(rules)

    def _read(self) -> Steps:
        while self._parallel or not self.num_calls:
            yield from self._content_until("@")
            name = ""
            while (character := (yield from self._peek())) != " ":
                name += character
                self._at += 1
            yield from self._skip_space()
            yield from self._arguments(self._begin(name))
