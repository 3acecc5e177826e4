"""One cache of answers for all gateways, in Redis, and one answer for all who ask the same at the same time.

    rules      may this request's answer be kept at all, and under which key    pure
    entry      an answer as bytes in Redis: checked, bounded, compressed
    scripts    what Redis runs: enter, renew, publish, keep, close, leave, watch
    store      the door to Redis: bounded time, faults counted
    flight     one answer in the making on this gateway, and its listeners
    reply      what one request learns about its answer: from where, its head, who pays
    front      in front of the service: from the cache, from somebody else, or made
    lead       makes the answer under a lease, and tells the others
    follow     reads an answer that another gateway is making
    shared     rules, keys and Redis as the rest of the gateway sees them: `SharedCache.stale` is the ladder's last rung

One lease for each key and priority. Whoever holds it makes the answer; its fence, which never comes again, is checked
by every script that writes, so a leader that was thought dead changes nothing when it comes back. The lease is renewed
while the work goes on; when its gateway dies it runs out, and a follower takes over. The leader's pieces go to a stream
in Redis only once somebody on another gateway wants them (who asks for them tells the leader's gateway by pub/sub, and
the next renewal says so too): an answer that nobody shares costs Redis two calls, however many tokens it has.

Nobody waits for anybody beyond their own deadline, more urgent requests never wait for less urgent ones, and what
breaks is not shared: whoever followed a leader that failed asks again, a bounded number of times, then alone.
"""
