"""A server's metrics over time: reading, recording, simulating, and the arithmetic on them."""
