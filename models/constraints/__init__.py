"""Grammars of llguidance (https://github.com/guidance-ai/llguidance) that constrain answers.

grammars   a JSON schema as a grammar that enforces it, or the path and keyword that cannot be enforced; the schemas of
           a request before a target is asked: refused, or loosened for tools that are only offered; the calls that can
           answer one message: their arguments are words of it
rewriting  the schema in the forms that llguidance enforces: formats, bounds, unions

The engine compiles the grammars for its model's tokens (models/llama_cpp/sampler.py).
"""
