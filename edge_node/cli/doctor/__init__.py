"""`causeway-edge doctor`: check everything that the daemon needs and say how to fix each problem.

It changes nothing and may run beside a daemon. Read `report` first (all checks in order, printed or as JSON). Each
check is a function that returns a `Finding` or several: see `packages`, `policy_and_models`, `host` and `network`.
"""
