"""Personal data and keys in texts: found, counted for policies, and masked on the way to a target.

detectors   text → the places of personal values and keys, by class
keys        the patterns of keys of clouds and forges
texts       every text of a request, in one order
facts       request → `GuardFacts`, the signals `pii.*` and `secrets.count`
mask        request → the request with placeholders, and its answer with the values again
"""
