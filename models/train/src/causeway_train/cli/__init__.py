"""`causeway-train`: the command line over the other rooms.

Read `commands` first: it holds the group and registers the commands of `assistant` (train, quantize, publish, ...),
`signals` (the learned router signals), `semantic` and `evaluate`. `options` holds what they share.
"""
