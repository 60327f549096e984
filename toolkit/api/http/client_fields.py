"""Fields that official clients and those of vLLM send and the routes do not declare.

ACCEPTED ones have no effect on the answer here. A field that would change the answer is refused:
the classes of bodies have such fields in `refused_fields`, which come from the tables here."""

from typing import Any

ACCEPTED = frozenset(
    {
        # attribution, storage, billing, place and speed of the service
        "access_programs", "billing_policy", "diagnostics", "fallback_credit_token", "fallbacks",
        "inference_geo", "metadata", "safety_identifier", "service_tier", "speed", "store",
        "user_profile_id", "workspace_id",
        # caches: common prefixes of prompts are always cached
        "cache_control", "cache_prompt", "n_cache_reuse", "prompt_cache_breakpoint",
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        # requests have no fixed slots
        "id_slot",
        # versions of the interface
        "anthropic_beta", "anthropic_version", "betas",
        # hints about speed and style
        "eager_input_streaming", "include_obfuscation", "task_budget", "verbosity",
        # conversations are not shortened: one that is too long is an error
        "context_management",
        # every tool is shown to the model, which calls it directly
        "allowed_callers", "async", "caller", "defer_loading", "input_examples", "max_tool_calls",
        "namespace", "output_schema", "toolset_name",
        # parts of earlier answers
        "annotations",
    }
)  # fmt: skip
"""Names at any depth of a body."""

NO_EFFECT: tuple[Any, ...] = (None, False, "", "none", "auto", "never", [], ["text"])
"""Values with which a field in the tables below is accepted."""

REFUSED_IN_GENERATION = {
    "guided_choice": 'use structured_outputs: {"choice": [...]}',
    "guided_grammar": 'use structured_outputs: {"grammar": "..."}',
    "guided_json": 'use structured_outputs: {"json": {...}}',
    "guided_regex": 'use structured_outputs: {"regex": "..."}',
    "prompt_embeds": "prompts are text, token ids and pictures",
    "thinking_token_budget": "reasoning has no limit of its own. Use max_tokens",
}
REFUSED_IN_CHATS = REFUSED_IN_GENERATION | {
    "audio": "answers are text",
    "documents": "send them as chat_template_kwargs, if the template reads them",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "modalities": "answers are text",
    "moderation": "this server does not moderate",
    "web_search_options": "this server does not search the web",
}
REFUSED_IN_CHAT_MESSAGES = {
    "audio": "only text and pictures are read, so send the transcript as content",
    "function_call": "use tool_calls",
}
REFUSED_IN_RESPONSES = {
    "conversation": "this server has no conversation objects. Use previous_response_id",
    "moderation": "this server does not moderate",
    "prompt": "this server stores no prompts. Send it as input",
}
_NO_SPEAKERS = "the models here do not distinguish speakers"
REFUSED_IN_TRANSCRIPTIONS = {
    "keywords": "write them in prompt",
    "known_speaker_names": _NO_SPEAKERS,
    "known_speaker_references": _NO_SPEAKERS,
    "languages": "use language",
}
REFUSED_BY_ANTHROPIC = {
    "compaction": "this server does not summarize conversations",
    "container": "this server runs no code and has no skills",
    "mcp_servers": "this server connects to no others. Send their tools as tools",
}
REFUSED_IN_ANTHROPIC_MESSAGES = {
    "clear_at": "a message stays in the conversation until it is left out",
}
REFUSED_IN_POOLING = {
    "task": "a model has one task, which its folder specifies, and no vectors of single tokens",
}
_NO_PICTURES = "answers are text"
REFUSED_BY_OLLAMA_GENERATE = {
    "context": "this server stores no conversations. Send them to /api/chat",
    "height": _NO_PICTURES,
    "steps": _NO_PICTURES,
    "suffix": "the models here do not fill in the middle",
    "template": "templates of Ollama are in Go's language. --chat-template sets one in Jinja for "
    "the server, and raw takes a prompt without any",
    "width": _NO_PICTURES,
}
_NO_SAMPLER = "the engine does not have this sampler. Leave it out, or set it to 0"
REFUSED_IN_LLAMA_COMPLETIONS = dict.fromkeys(
    ("dry_multiplier", "dynatemp_range", "mirostat", "xtc_probability"), _NO_SAMPLER
) | {
    "lora": "name one adapter as model, at its own scale",
    "min_keep": "samplers keep as many tokens as they choose",
    "n_indent": "answers have no minimum indentation",
    "post_sampling_probs": "log-probabilities are those before sampling",
    "t_max_predict_ms": "--request-timeout limits requests, and n_predict their tokens",
}
