"""Trains, measures and publishes the assistants and the router signals that ship with Causeway.

Read `assistant/run.py` for the assistants (data, network, auxiliary_losses, export are its parts), then `signals/`.
`function_calls` defines the calls that the assistants answer with, `evaluate` measures models, `publish` writes
artifacts, and `cli` holds the commands. Only the training of assistants and of the semantic cache's judge imports torch
(extra `torch`); commands import it inside functions.
"""
