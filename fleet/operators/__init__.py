"""Operators: sign-in, roles, their HTTP interface, and the audit log's hash chain."""
