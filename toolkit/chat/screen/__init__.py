"""What the chat draws on a terminal."""
