"""A server's metrics over time: fetched, recorded, simulated, and the arithmetic on them."""
