"""From an ask to the deltas of exactly one endpoint of its tier: deadlines, retries, hedges.

dispatch.Dispatch   the loop: lease, try, and again elsewhere while that may help
race                two tries at once until one has its first delta; the other is cancelled
attempt.Try         one endpoint's go: owns a lease and a call
verdict             which errors may be tried again elsewhere, one line for each class
budget              how many extra tries there may be: pure, explicit time
pace                how soon first tokens come: when to hedge, and whether to start at all
assembly            a tier's configuration and pool → its dispatch, with metrics

Before the first delta everything may be tried again, after it nothing: the caller may have shown it to somebody.
What is left of the request's time travels with each try, because each is made from the same monotonic deadline.
Retries and hedges together stay within the retry budget, so one request in five at most becomes two.
"""
