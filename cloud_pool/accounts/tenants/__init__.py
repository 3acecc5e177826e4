"""What each tenant may use, and what it has used.

    config.py        caps, rates, budgets and prices
    rate_limiter.py  token buckets and budgets in Redis, shared by all gateways,
                     or this gateway's share of them, while Redis is unavailable
    usage.py         what a request reserves and uses, summed by tenant, tier, route and day in Redis; the keys
    lua/             what Redis runs

Money is counted in whole micro-dollars: sums of many small floats would drift.
"""
