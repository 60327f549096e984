"""HTTP below the routes: connections, keys, limits, error bodies, event streams."""
