"""`python -m causeway_server.fleet` is `causeway-fleet`."""

from .cli.commands import main

main()
