"""Calibrate a pair of models on the owner's prompts: collect answers, label them, fit the signals, report."""

SHADOW_FILE = "shadow-1.sqlite"
"""The daemon's file of shadow answers. It stands here because `shadow` imports numpy."""
