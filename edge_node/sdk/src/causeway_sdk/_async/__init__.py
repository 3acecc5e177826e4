"""The client and the outbox, written once, as coroutines; `_sync` is the same code without `await`."""
