"""Proofs about policies: `decide` and `plan_cache` as formulas over all requests and signals, which z3 solves.

Reading order: facts (what a request and a device may be), conditions (CEL as formulas), outcome (what a policy
decides), claims (what is to hold), witness and texts (a counterexample as a test case), proof (the solver). Needs the
extra `fleet`.
"""
