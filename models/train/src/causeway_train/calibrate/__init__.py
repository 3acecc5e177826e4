"""Calibration of a pair of models on the owner's prompts: collect answers, label them, fit the signals, report."""
