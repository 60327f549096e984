"""Text in and out: tokenizers, chat templates, tool and reasoning formats."""
