"""Load balancing over each tier's Triton endpoints: which one gets the next request, and which get none for now.

Decide, then act. `endpoint_selection` is a pure function over a frozen `state.PoolState`, and `health` and `slowness`
are the transitions of that state. Each returns what is to be done (endpoints to probe), and `pool.Pool`, the only
owner of the state, does it. The life of an endpoint:

    phase              event                                          next phase
    active             failures in a row, refused, or hung            ejected, up to a share of the pool; else probed
    active             a probe fails (proof: no bound)                ejected
    active             no longer listed                               draining: running calls end, no new ones start
    ejected            its time is over                               stays ejected; a probe is sent
    ejected            the probe succeeds                             active
    ejected            the probe fails                                ejected; probed again soon
    active             LATE_LIMIT late first tokens in a row          active, slow: probed; requests if all are busy
    active, slow       a probe is as fast as its peers                active, on trial: one request goes there
    active, on trial   that request is in time                        active
    active, on trial   that request is late                           active, slow, for longer each time
    ejected            no longer listed                               draining
    draining           listed again                                   ejected until a probe succeeds; probed at once
    draining           its last call ended                            removed

Reading order:

    state                the frozen state
    endpoint_selection   load, zones, two random choices
    prefix_affinity      warm prefixes, bounded load
    health               failures, ejection, return
    slowness             slower than its peers
    capacity             how many endpoints take requests, for admission
    pool                 owner of the state: leases and probes
    lease                one call on one endpoint
    pools                all tiers, and the Triton clients by address
    discovery            addresses and DNS names
    config, metrics      the section `load_balancing`; Prometheus
"""
