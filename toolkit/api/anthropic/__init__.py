"""The Anthropic route: messages."""
