"""What each tenant may use, and what it has used.

    limits     caps, rates, budgets and prices, as the configuration says them
    bucket     the token bucket: a pure function of `now`
    budgets    rates shared by all gateways, as buckets in Redis; a share of them locally while Redis is away
    usage      tokens and cost per tenant, tier and route, by day, in Redis
    scripts    the Lua that Redis runs for both
    command    `causeway-cloud usage`
    accounts   the three together: one call before the work, one after it

Money is counted in whole micro-dollars: sums of many small floats would drift.
"""
