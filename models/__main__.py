"""`python -m models` is `causeway-models`."""

from .cli import main

main()
