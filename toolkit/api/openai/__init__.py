"""The OpenAI routes: completions, chat, responses, models, and the tokenizer's."""
