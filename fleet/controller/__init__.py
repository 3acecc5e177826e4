"""The controller, which drives each cohort's rollout from its checks to DONE or REVERTED.

    step.py        canary and control among the devices; one step of one rollout, a pure function over them
    checks.py      LINT and REPLAY of a signed bundle
    publisher.py   from the store's rollouts to the published plans, signed with the online keys, and to the devices
    loop.py        reads the store, steps, writes, publishes; one process at a time

Every decision is in the store before its effect, and every effect is the difference between what the store says and
what is published. So a controller that was killed continues where it stopped.
"""
