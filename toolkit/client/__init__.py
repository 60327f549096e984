"""The parts that every client of an OpenAI-compatible server shares."""
