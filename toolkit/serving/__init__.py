"""The processes of a server: start-up, API workers, their supervisor, and shutdown."""
