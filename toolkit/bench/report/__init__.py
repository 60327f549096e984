"""Statistics of a run, and their output as table, JSON, HTML and comparison."""
