"""From logits to tokens, and drafts."""
