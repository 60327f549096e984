"""`python -m toolkit` is `tk`."""

from toolkit.cli import main

main()
