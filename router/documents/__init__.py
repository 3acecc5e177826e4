"""Strict YAML files: `strict_yaml` parses text to a tree, `reader` reads the tree into a struct."""
