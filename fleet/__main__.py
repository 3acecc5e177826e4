"""The entry point of `python -m causeway_server.fleet`, which is the program `causeway-fleet`."""

from .cli.commands import main

main()
