"""The cache of answers in Redis, which all gateways share, and single-flight: identical requests share one generation.

    caching_service    in front of the service: the answer is cached, in progress, or generated
    shared_generation  one generation on this gateway with its subscribers, which may start over
    leader             generation of an answer under a lease, or following the leader on another gateway
    shared_cache       rules and keys, and the store
    store              calls to Redis: bounded in time, faults counted; the scripts in `lua`
    entry_codec        an answer as bytes in Redis: authenticated, bounded, compressed

There is one lease for each cache key and priority. Its holder, the leader, generates the answer. Every script that
writes checks the lease's fence, which is never reused, so a leader that was presumed dead cannot change anything when
it returns. The leader renews the lease while it works; when its gateway dies, the lease expires and a follower takes
over. The leader writes its chunks to a stream in Redis only once a request on another gateway wants them (the follower
tells the leader's gateway by pub/sub, and the next renewal reports it too): an answer without followers costs Redis two
calls, however many tokens it has.

No request waits beyond its own deadline, and more urgent requests never wait for less urgent ones. Errors are not
shared: the followers of a failed leader try again, a bounded number of times, and then each generates for itself.
"""
