"""`causeway-models`: the command line over the other rooms of `models`.

Read `commands` first: it holds the group and registers the commands of `catalog` (list, verify, add, fit), `evaluate`,
`assistant` (train, quantize, publish, ...) and `signals` (the learned router signals). `options` holds what they share.
"""
