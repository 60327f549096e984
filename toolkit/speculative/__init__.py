"""Speculative decoding: drafters propose tokens, and a step of the model verifies them."""
