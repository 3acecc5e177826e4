"""`python -m fleet` is `causeway-fleet`."""

from .cli import main

main()
