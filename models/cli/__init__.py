"""`causeway-models`: the command line over the other rooms of `models`.

Read `commands` first: it holds the group and registers the commands of `catalog` (list, verify, add, fit), `pull` and
`calibrate`. `options` holds what they share.
"""
