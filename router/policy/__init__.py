"""Policies: from the text of a file to compiled rules.

Reading order: file (the grammar), signals (the signal table, reading signals, evaluating conditions), expression and
cel_source (compiling conditions), lint (semantic checks), compiled (`Policy`, `parse_policy`).
"""
