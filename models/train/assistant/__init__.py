"""The training of the two assistants: `run` starts it, `mixture` draws the examples, `trainer` is the loop."""
