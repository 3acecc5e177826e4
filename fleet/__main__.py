"""`python -m fleet` is `causeway-fleet`."""

from .cli.commands import main

main()
