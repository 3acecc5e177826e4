"""The training of the two assistants.

`run` starts it, `mixture` draws the examples, `batches` runs the network on them, `trainer` is the loop.
"""
