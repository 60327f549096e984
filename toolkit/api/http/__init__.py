"""HTTP below the routes: connections, keys, limits, error bodies, event streams.

A request passes these, in this order, before it costs the engine anything:

- `connections`: number of connections; size and time of the head; data that is not
  HTTP; requests that wait, and clients that do not read
- `layers.gate`: id; log line and metrics, whatever the outcome
- `layers.cors`: preflights
- `layers.access`: key, draining, the queue, the client's limits; then size, time, nesting and
  number of values of the body, without parsing it, and the memory of all bodies (`layers.limits`)
- `openai.generation.start_group`: all its prompts start, or none; they must fit the queue, and the
  parameters that they share and their log-probabilities are bounded"""
