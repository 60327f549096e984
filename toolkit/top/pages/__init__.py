"""The pages of the dashboard. They turn the state into lines and do not use the terminal."""
