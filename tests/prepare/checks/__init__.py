"""What words in ARGS add to `make dist-check`: each is a module with `ask`, before all else, and `check`."""
