"""Load generation: datasets, arrival times, HTTP client, client processes."""
