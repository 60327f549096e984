"""An example of every plug-in of tk. docs/plugins.md shows these files."""
