"""The load itself: datasets, arrival times, HTTP client, client processes."""
