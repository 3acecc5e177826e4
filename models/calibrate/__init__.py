"""Calibration of a pair of models on the owner's prompts: collect answers, label them, fit the signals, report."""

SHADOW_FILE = "shadow-1.sqlite"
"""The name of the file with the daemon's shadow answers. It is defined here because importing `shadow` would import
numpy.
"""
