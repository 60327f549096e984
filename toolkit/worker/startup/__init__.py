"""Steps of a worker's start-up: devices, weights, drafters, the size of the cache, warm-up."""
