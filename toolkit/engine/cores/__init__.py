"""Engine cores in processes of their own: start, connect, watch, restart, choose among."""
