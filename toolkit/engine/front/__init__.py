"""The side that takes requests: prompts become requests, and tokens become text."""
