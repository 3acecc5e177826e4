"""Comparison of two models on a file of prompts: what a quantisation, an adapter or another model changes.

Read `prompts` first (the lines of the file, and how an answer is graded), then `model` (a GGUF that is measured) and
`compare` (the figures of two, and an owner's limits for them).
"""
