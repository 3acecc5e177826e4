"""The command line `causeway-models`.

Read `commands` first: it holds the group and registers the commands of `catalog` (list, verify, add, fit) and `pull`,
and those that `causeway-train` adds. `options` holds the options that several commands share.
"""
