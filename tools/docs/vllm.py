"""docs/from-vllm.md, made from the table of flags."""

from __future__ import annotations

import textwrap

from toolkit.config.vllm import BENCH, GIB, SERVE, Note, Refusal, Table, Use, Variable

WIDTH = 100

HEAD = """\
# From vLLM

The flags of `vllm serve` and `vllm bench serve` are those of `tk serve` and `tk bench serve`:

```sh
tk serve gpt2 -tp 1 --dtype half --max_model_len 1k --enable-auto-tool-choice -O3
```

- Flags that have the same name and meaning in both are in `tk man serve` and `tk man bench-serve`.
- Below is the rest: a table of flags with another name in tk, flags without an effect, which tk
  notes on stderr, and flags that tk refuses.
- Underscores in flags are dashes. `8k` is 8,000, `8K` is 8,192. A flag that begins with "disable"
  is the opposite of that with "enable". `--hf-overrides.rope_theta 1e6` sets a field of a JSON
  object.
- `--config FILE.yaml` is a file of flags, which the command line overrides. tk's own settings files
  are [TOML](configuration.md).
- Defaults are tk's. `tk bench` sends 200 prompts of 128 tokens where vLLM sends 1,000 of 1,024,
  asks for greedy answers of full length, and takes the lengths of answers from a file.
- Variables are tk's: each flag is one, as `TK_MAX_MODEL_LEN`. `TK_API_KEY` is the key of the
  server and of its clients, where vLLM has `VLLM_API_KEY` and `OPENAI_API_KEY`. A server without a
  key refuses to start if `VLLM_API_KEY` is set.
- `tk bench throughput` takes `--input-len`, `--output-len` and `--num-prompts`, and no data sets;
  `vllm bench sweep serve` is `tk bench sweep`.
- In requests, `structured_outputs` replaces `guided_json`, `guided_regex`, `guided_choice` and
  `guided_grammar`, which are a 400 that says so.
- `--metrics-prefix vllm` gives metrics the names that dashboards for vLLM read.
- `--save-result` writes the fields of vLLM's results, next to tk's own: `request_throughput`,
  `mean_ttft_ms`, `p99_itl_ms` and so on. Latencies in them count from sending.

This page is made from the table that the program reads (`make docs`).

## Python

`from toolkit import LLM, SamplingParams` replaces `from vllm import LLM, SamplingParams`, and the
arguments of `LLM` are translated as the flags below are: `dtype="half"` is float16, and
`enable_chunked_prefill=True` only logs that it has no effect. [Python](python.md) has tk's own
interface. These differ:

| vLLM | tk |
|---|---|
| `llm.get_tokenizer().apply_chat_template(messages)` | `llm.chat_prompt(messages)`: token ids |
| `TokensPrompt(prompt_token_ids=ids)` | `{"prompt_token_ids": ids}` |
| `llm.beam_search(...)[0].sequences` | `llm.beam_search(...)[0].outputs`, without the prompt |
| `llm.encode(...)` | `llm.embed(...)` |
| `llm.classify(...)` | the server's `/classify` |
| `vllm.lora.request.LoRARequest` | `toolkit.LoRARequest` |
| `vllm.sampling_params.StructuredOutputsParams` | `toolkit.StructuredOutputsParams` |
| `logits_processors` of `SamplingParams` | a [plug-in](plugins.md) |
| `llm.sleep()` | `llm.shutdown()` |
"""


def vllm_page() -> str:
    """Return the page."""
    parts = [HEAD]
    for title, table in (("tk serve", SERVE), ("tk bench serve", BENCH)):
        parts.append(f"\n## Flags of {title}\n\n{renamed_flags(table, 'vLLM')}")
        parts.append(f"\nWithout an effect:\n\n{flags_with_reasons(table, Note)}")
        parts.append(f"\nRefused:\n\n{flags_with_reasons(table, Refusal)}")
    return "".join(parts)


def renamed_flags(table: Table, program: str) -> str:
    """Return the table of flags of a program that have another name in tk."""
    rows = [
        f"| {_listed(flag)} | {_spelled(outcome)} |\n"
        for outcome, flags in table
        if isinstance(outcome, Variable) or (isinstance(outcome, Use) and outcome.flags)
        for flag in flags.split()
    ]
    return f"| {program} | tk |\n|---|---|\n" + "".join(rows)


def _spelled(use: Use | Variable) -> str:
    """Return tk's flags as code, without a value that is that of the other flag."""
    if isinstance(use, Variable):
        return f"the variable `{use.name}`, which `tk pull` and `tk models` read too"
    unit = ", in GiB" if use.divisor == GIB else ""
    return f"`{use.flags.removesuffix(' {}').replace('{}', 'VALUE')}`{unit}"


def flags_with_reasons(table: Table, kind: type[Note | Refusal]) -> str:
    """Return a list of sentences, each with its flags."""
    lines = []
    for outcome, flags in table:
        if isinstance(outcome, kind):
            sentence = outcome.reason if isinstance(outcome, Note) else outcome.advice.rstrip(".")
            text = f"- {sentence}: {_listed(flags)}"
            lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def _listed(flags: str) -> str:
    """Return the flags as code, without the signs of the table."""
    shown = [flag.removesuffix("=...").rstrip("=").replace("=", " ") for flag in flags.split()]
    return ", ".join(f"`{flag}`" for flag in shown)
