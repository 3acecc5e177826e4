"""Strict YAML files: `strict_yaml` parses text to a tree, `reader` reads the tree into a struct. `data` reads the data
files of the code itself.
"""
