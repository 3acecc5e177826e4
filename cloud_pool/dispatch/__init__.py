"""Dispatch of an inference request to exactly one endpoint of its tier: load balancing, deadlines and retries.

Before the first delta everything may be retried, after it nothing: the caller may already have shown it. Every attempt
has the rest of the request's time, because all use the same monotonic deadline. Retries stay within the retry budget,
so at most one request in five becomes two.

Reading order:

    dispatcher           the loop: lease, attempt, and again elsewhere while rules and budget allow it
    pool                 a tier's endpoints: leases and probes; the pools of all tiers
    endpoint_selection   the state of a tier's endpoints, how slow each is, and which gets the next request; pure
    prefix_index         which endpoint has the beginning of a prompt in its KV cache; pure
    health               which endpoints get no request for now; pure
    discovery            addresses and DNS names
    config, metrics      the configuration's keys; Prometheus
"""
