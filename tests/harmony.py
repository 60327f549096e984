"""A chat template that writes harmony, as OpenAI's guide describes it, and its special tokens."""

TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|return|>", "<|call|>")
"""Without `<|end|>`, which the tests' tokenizer has."""

TEMPLATE = r"""{%- macro type_of(schema) -%}
{%- if schema.enum -%}
"{{ schema.enum | join('" | "') }}"
{%- elif schema.type == "array" -%}
{{ type_of(schema["items"]) }}[]
{%- elif schema.type == "integer" -%}
number
{%- else -%}
{{ schema.type or "any" }}
{%- endif -%}
{%- endmacro -%}

{%- macro write(role, content, end="<|end|>") -%}
{{ "<|start|>" + role + "<|message|>" + content + end }}
{%- endmacro -%}

{%- macro system() -%}
{{ model_identity or "You are ChatGPT, a large language model trained by OpenAI." }}
Knowledge cutoff: 2024-06
Current date: {{ strftime_now("%Y-%m-%d") }}

Reasoning: {{ reasoning_effort or "medium" }}

# Valid channels: analysis, commentary, final. Channel must be included for every message.
{{- "\nCalls to these tools must go to the commentary channel: 'functions'." if tools -}}
{%- endmacro -%}

{%- macro functions() -%}
# Tools

## functions

namespace functions {

{% for tool in tools -%}
{%- set function = tool.function -%}
{{ "// " + function.description + "\n" if function.description }}
{{- "type " + function.name + " = (" -}}
{%- if function.parameters and function.parameters.properties -%}
{{- "_: {\n" -}}
{%- for name, schema in function.parameters.properties.items() -%}
{{- "// " + schema.description + "\n" if schema.description -}}
{{- name + ("" if name in (function.parameters.required or []) else "?") + ": " -}}
{{- type_of(schema) + "," -}}
{{- " // default: " + schema.default if schema.default is defined -}}
{{- "\n" -}}
{%- endfor -%}
}
{%- endif -%}
{{- ") => any;\n\n" -}}
{%- endfor -%}
} // namespace functions
{%- endmacro -%}

{%- macro developer(has_instructions) -%}
{{- "# Instructions\n\n" + messages[0].content if has_instructions -}}
{{- "\n\n" if has_instructions and tools -}}
{{- functions() if tools -}}
{%- endmacro -%}

{{- write("system", system()) -}}
{%- set has_instructions = messages and messages[0].role in ("system", "developer") -%}
{%- set rest = messages[1:] if has_instructions else messages -%}
{%- if has_instructions or tools -%}
{{- write("developer", developer(has_instructions)) -}}
{%- endif -%}
{%- set final = namespace(at=-1) -%}
{%- for message in rest -%}
{%- if message.role == "assistant" and not message.tool_calls -%}
{%- set final.at = loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- set called = namespace(name="") -%}
{%- for message in rest -%}
{%- if message.role == "user" -%}
{{- write("user", message.content) -}}
{%- elif message.role == "tool" -%}
{%- set header = "functions." + called.name + " to=assistant<|channel|>commentary" -%}
{{- write(header, message.content) -}}
{%- elif message.role != "assistant" -%}
{{- raise_exception("no role " + message.role) -}}
{%- elif message.tool_calls -%}
{%- if message.content and message.thinking -%}
{{- raise_exception("content and thinking exclude each other before a call") -}}
{%- endif -%}
{%- set thoughts = message.thinking or message.content -%}
{%- if thoughts and loop.index0 > final.at -%}
{{- write("assistant<|channel|>analysis", thoughts) -}}
{%- endif -%}
{%- if message.tool_calls | length > 1 -%}
{{- raise_exception("one call for each message") -}}
{%- endif -%}
{%- set called.name = message.tool_calls[0].function.name -%}
{%- set header = "assistant to=functions." + called.name + "<|channel|>commentary json" -%}
{{- write(header, message.tool_calls[0].function.arguments | tojson, "<|call|>") -}}
{%- else -%}
{{- write("assistant<|channel|>final", message.content) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
