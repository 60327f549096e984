"""How a token is chosen: parameters, the sampler, log-probabilities."""
