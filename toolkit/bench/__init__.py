"""The load generator: arrivals, prompts, client, statistics, report."""
