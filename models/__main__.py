"""`python -m models` is `causeway-models`."""

from .cli.commands import main

main()
