"""The controller: drives each cohort's rollout from its checks to DONE or REVERTED.

    observed.py    the boxes of a cohort as the controller sees them; canary and control
    step.py        one step of one rollout: a pure function over what was observed
    checks.py      LINT and REPLAY of a signed bundle
    publisher.py   plans and freshness, signed with the online key
    plans.py       from the store's rollouts to the published plans, and to the boxes
    revoked.py     revocations that a restored database has lost
    loop.py        reads the store, steps, writes, publishes; one process at a time

Every decision is in the store before its effect, and every effect is the difference between what the store says and
what is published. So a controller that was killed continues where it stopped.
"""
