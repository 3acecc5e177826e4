"""The egress ledger, as values: the Merkle tree (`tree`), the form of a log (`log`) and the comparison of logs
(`reconcile`). An auditor reads `tree` to check a proof; `router/serving/egress` writes the logs.
"""
