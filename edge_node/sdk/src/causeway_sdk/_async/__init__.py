"""The client and the outbox: `_async` is written by hand, `_sync` is made from it by each build (`setup.py`)."""
