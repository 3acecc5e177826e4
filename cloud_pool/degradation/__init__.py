"""Degradation in the cloud: an answer of a lower tier, a truncated or stale answer, or an error with Retry-After.

Reading order:

    config           the tiers in order, and the speed of backing off and returning
    tier_health      one tier's share of the work, with hysteresis; arrival rate, and how much work fits; pure
    fallback         tier states → the fallback steps of one request; owns health, breakers and times to first token;
                     keeps tiers warm
    tier_attempt     one tier up to its first delta; the deltas of several sequences as they come

Each priority has a separate health on each tier: under stress the least urgent work that is present moves first, and
comes back last. Otherwise every priority would be spread over every tier.

A request is critical when its header `x-causeway-critical: true` says so and its token permits it, or its tenant is in
`degradation.critical_tenants`. It gets the tier that it names or an error: never another model, a truncated answer or a
stale one. Jobs are critical too: they have time, and wait for the tier that they name.
"""
