"""Measures models: `greedy` answers prompts with llama.cpp, `assistant` scores the answers into a `report`;
`routing_table` shows routing curves.
"""
