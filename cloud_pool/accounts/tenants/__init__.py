"""What each tenant may use, and what it has used.

    config.py        caps, rates, budgets and prices
    rate_limiter.py  token buckets and budgets in Redis, shared by all gateways
    local_limits.py  this gateway's share of them, while Redis is unavailable; token_bucket.py
    usage.py         tokens and cost per tenant, tier, route and day, in Redis
    reservation.py   what a request may use, and what it has used
    accounting.py    all together: reserve before a request, settle after it
    redis_keys.py    their keys; lua/ their scripts
    metrics.py       Prometheus metrics

Money is counted in whole micro-dollars: sums of many small floats would drift.
"""
