"""Routes for pooled prompts: embeddings, scores, ranks."""
