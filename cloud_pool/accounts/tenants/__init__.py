"""What each tenant may use, and what it has used.

    config.py        caps, rates, budgets and prices
    rate_limiter.py  token buckets in Redis, shared by all gateways; local ones while Redis is unavailable
    usage.py         tokens and cost per tenant, tier, route and day, in Redis
    accounting.py    both together: reserve before a request, settle after it
    redis_keys.py    their keys; lua/ their scripts
    metrics.py       Prometheus metrics

Money is counted in whole micro-dollars: sums of many small floats would drift.
"""
