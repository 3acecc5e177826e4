"""The command line `causeway-train`.

Read `commands` first: it holds the group and registers the commands of `assistant` (train, quantize, publish, ...),
`signals` (the learned router signals), `semantic` and `evaluate`. `options` holds the options that several commands
share.
"""
