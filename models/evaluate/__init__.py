"""Measures models and router signals.

`greedy` answers prompts with llama.cpp, `assistant` scores the answers into a `report`; `routing_curves` and
`routing_plots` compare router signals over a pair of models.
"""
