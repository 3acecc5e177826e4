"""How the cloud degrades: tiers best first, then a shorter answer, then a stale one, then an honest refusal.

    settings    what an operator says: the tiers in order, how fast to back off and to return
    footing     one tier's standing: which share of the work it is offered, with hysteresis    pure, `now` is given
    callers     where each caller stands in the line for a share     pure
    plan        the tiers' states and footings → the rungs of one request, each with its why   pure
    ladder      owns footings, breakers and times to first token; reads pools and admissions
    cutting     how far an answer is shortened, and the token on its last piece
    continuing  the token with which the rest of a shortened answer is asked for
    warmth      keeps tiers warm
    metrics     for Prometheus

Each priority has a footing of its own on each tier: under stress the least urgent work that there is moves first, and
comes back last, or every priority would be on every tier.

Who may stay: a request is critical when its header `x-causeway-critical: true` says so or its tenant is in
`ladder.critical_tenants`. It gets the tier it asked for or a refusal: never another model, a shortened answer or a
stale one. Jobs stay too: they have time, and wait for the tier that they named.
"""
