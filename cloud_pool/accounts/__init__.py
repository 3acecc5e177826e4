"""Callers, their limits and their costs.

identity/    bearer token -> Principal: static and signed tokens, key rotation, revocation
tenants/     rates, token and money budgets, usage: shared by all gateways through Redis
ledger.py    one entry per request: limits before it, usage, cost and an audit record after it; the tenants' metrics
audit.py     the audit log
accounts.py  the parts above as one object, as gateway and worker hold it
"""
