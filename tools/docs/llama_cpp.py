"""docs/from-llama.cpp.md, made from the table of flags."""

from toolkit.config.llama_cpp import SERVE
from toolkit.config.vllm import Note, Refusal
from tools.docs.vllm import flags_with_reasons, renamed_flags

HEAD = """\
# From llama.cpp

`tk serve` takes the command line of `llama-server`, and the server its requests:

```sh
tk serve -hf Qwen/Qwen3-0.6B -c 512 -np 4 -t 2 --temp 0.7
curl http://127.0.0.1:8000/completion -d '{"prompt": "The sea is", "n_predict": 16}'
```

- The port is 8000, not 8080, without `--port`. `-c` is the context of each request: tk does not
  divide it by `-np`.
- `-m FILE` and `-hf USER/REPO:Q4_K_M` may be written without the flag. [GGUF](gguf.md) has the
  types and models that run.
- `model` in requests is the name of the model, or left out; `-a NAME` serves it under another.
- Settings in files and variables are [tk's](configuration.md): `TK_MAX_MODEL_LEN` in place of
  `LLAMA_ARG_CTX_SIZE`.
- `llama-cli` is `tk chat` or `tk run`, with tk's flags: `-m FILE -p TEXT -n 64 --temp 0` is
  `tk run FILE TEXT --max-tokens 64 --temperature 0`. `llama-bench` is `tk bench offline`.

## Endpoints

Bodies are JSON, whatever their content type, but OpenAI's and Anthropic's endpoints want
`Content-Type: application/json`. Keys, limits, metrics and cancelling are those of the
[other APIs](api.md); errors have OpenAI's format. Pages of other sites need
[`--allowed-origins`](security.md).

| endpoint | here |
|---|---|
| `POST /completion`, `/completions` | the fields below; OpenAI's is `/v1/completions` |
| `POST /v1/chat/completions`, `GET /v1/models` | [OpenAI's](api.md), also without v1 |
| `POST /v1/messages`, `/api/chat`, ... | Anthropic's and [Ollama's](ollama.md) |
| `POST /apply-template` | the prompt of a chat as text, which `/completion` takes |
| `POST /tokenize` | `content`, `add_special`, `with_pieces`; also vLLM's fields |
| `POST /detokenize` | `tokens`; the text is `content`, and `prompt` |
| `POST /embedding`, `/embeddings` | `content`; for [models with embeddings](embeddings.md) |
| `POST /rerank, /reranking` | see [embeddings](embeddings.md) |
| `GET /props` | defaults of sampling, context, template, end tokens, `modalities` |
| `GET /slots` | a slot for each of `--max-num-seqs` requests; `fail_on_no_slot` |
| `GET /lora-adapters` | the adapters, which requests name as their `model` |
| `GET /health`, `/metrics` | [probes and metrics](operations.md); the names are tk's |
| `POST /infill, /props, /lora-adapters, /slots/{id}` | 400, with what to use |

## Fields of /completion

| field | here |
|---|---|
| `prompt` | a text, token ids, both mixed, `{"prompt_string": ...}`, or a list of these |
| `n_predict`, `max_tokens` | up to the end of the context, as -1 and none; 0: only the prompt |
| `temperature`, `top_k`, `top_p`, `min_p`, `seed`, `stop` | used; left out: the model's defaults |
| `repeat_penalty`, `repeat_last_n` | used; 0 tokens: no penalties; -1 or none: all tokens |
| `presence_penalty`, `frequency_penalty`, `ignore_eos` | used |
| `logit_bias` | pairs of a token or a text, and a number or false; an object; from -100 to 100 |
| `grammar`, `json_schema` | GBNF or Lark; a [schema](api.md#structured-output) that is not strict |
| `n_probs` | up to 100, before sampling; `post_sampling_probs` is a 400 |
| `stream`, `return_tokens`, `response_fields`, `timings_per_token`, `n_cmpl` | used |
| `cache_prompt`, `n_cache_reuse`, `id_slot`, `n_keep` | no effect: prefixes are always cached |
| `mirostat`, `dry_multiplier`, `xtc_probability`, `dynatemp_range` | 0; others are a 400 |
| `typical_p`, `top_n_sigma` | 1 and -1; others are a 400 |
| `lora`, `min_keep`, `n_indent`, `t_max_predict_ms`, `multimodal_data` | 400, unless empty or 0 |

- Other fields, such as `samplers`, are ignored and named in the header `X-Ignored-Fields`; with
  `--strict` they are a 400. The temperature applies first, then `min_p`, `top_k` and `top_p`.
- Penalties for presence and frequency count tokens of the answer alone.
- `id_slot` of an answer is -1. `truncated` says that the context ended it.
- Pictures go to `/v1/chat/completions`, as `image_url`.

Chats take `grammar`, `json_schema`, `repeat_penalty`, `n_probs`, `cache_prompt`, `id_slot` and
`timings_per_token`, too.
"""


def llama_cpp_page() -> str:
    """Return the page."""
    return (
        f"{HEAD}\n## Flags\n\n{renamed_flags(SERVE, 'llama.cpp')}"
        f"\nWithout an effect, which tk notes on stderr:\n\n{flags_with_reasons(SERVE, Note)}"
        f"\nRefused:\n\n{flags_with_reasons(SERVE, Refusal)}"
        "\nThe flags on this page are made from the table that the program reads (`make docs`).\n"
    )
