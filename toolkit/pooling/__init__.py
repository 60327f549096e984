"""Pooling: one vector per prompt. Settings, heads and the pooling of decoders."""
