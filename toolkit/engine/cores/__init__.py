"""Engine cores in their own processes: start, connect, monitor, restart, route requests."""
