"""Measurement of models: `greedy` answers prompts with llama.cpp, `assistant` scores the answers into a `report`, and
`routing_table` shows routing curves.
"""
