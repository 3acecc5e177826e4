"""Trains, measures and publishes the assistants and the router signals that ship with Causeway.

Read `assistant/run.py` for the assistants (data, network, auxiliary_losses, export are its parts), then `signals/`.
`function_calls` holds what the assistants answer with, `evaluate` measures, `publish` writes the artifact; `cli`.
Only the training of assistants and of the semantic cache's judge imports torch (extra `torch`); commands import it
inside functions.
"""
