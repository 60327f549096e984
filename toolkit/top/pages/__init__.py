"""What can be looked at, one page each: they turn the state into lines and know nothing of the terminal."""
