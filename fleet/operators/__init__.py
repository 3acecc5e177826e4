"""Operators: how they sign in, what each role may do, the HTTP interface that they use, and the audit log's chain."""
