"""The writer of the egress ledger."""
