"""Choosing tokens: parameters, the sampler, log-probabilities, grammars."""
