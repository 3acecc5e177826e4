"""Limits and usage of each tenant.

    config.py        caps, rates, budgets and prices
    rate_limiter.py  token buckets and budgets in Redis, shared by all gateways,
                     or this gateway's share of them, while Redis is unavailable
    usage.py         what a request reserves and uses, summed by tenant, tier, route and day in Redis; the keys
    lua/             Redis scripts

Money is counted in whole numbers of 1e-12 USD: sums of many small floats would drift.
"""
