"""Blocks of the KV cache: their pool, the prefix cache, and requests' tables of them."""
