"""Each tier's Triton endpoints: who of them gets the next request, and who gets none for now.

Assign, then act. `choice` is a pure function over a frozen `state.PoolState`, `health` the transitions of that state;
each returns what is to be done (endpoints to ask), and `pool.Pool`, the state's one owner, does it. An endpoint's life:

    phase       event                                   then
    in          faults in a row, refused, hung          ejected     at most a share of the pool; the others are asked
    in          a real request to it failed             ejected     proof: no bound
    in          not named any more                      draining    running calls end, no new ones
    ejected     its time is over                        (asked, by a real request)
    ejected     … answered                              in          with a share that grows from little
    ejected     … did not                               ejected     asked again soon; only a relapse makes it longer
    in          late first tokens in a row              in, slow    asked by probes, and by requests if all are busy
    in, slow    a probe as quick as its peers           in, tried   one request goes there
    in, tried   … in time                               in          with a share that grows from little
    in, tried   … late                                  in, slow    for longer each time
    ejected     not named any more                      draining
    draining    named again                             ejected     until it is asked, at once
    draining    its last call ended                     (gone)

    place       what the configuration says     discovery   DNS names, asked again and again
    state       the frozen state                pool        its owner: leases, and asking endpoints
    slowness    who is slower than its peers
    load        how much work one has           lease       one call's place on one endpoint
    choice      two choices, zones              pools       every tier's pool, and the Triton clients
    prefix      warm prefixes, bounded load     reload      SIGHUP
    health      faults, ejection, return        report      metrics
"""
