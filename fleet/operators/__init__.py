"""Operators: sign-in, roles, and their HTTP interface."""
