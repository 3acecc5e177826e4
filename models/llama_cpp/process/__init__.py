"""The engine in a child process, so that a crash, an out-of-memory kill or a bad GGUF never ends the daemon.

`parent` is the daemon's side (asyncio), `child` the program it starts; `protocol` has the frames between them.
"""
