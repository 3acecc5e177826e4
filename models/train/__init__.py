"""Trains the assistants and the router signals, and exports them.

Read `assistant/run.py` for the assistants (data, network, auxiliary_losses, export are its parts), then `signals/`.
Only these rooms import torch (extra `train`), `signals/` does without; commands import them inside functions.
"""
