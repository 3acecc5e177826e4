"""The command `causeway-edge up`. Read `session` first: it runs the programs (`child_process`) for the chosen
`models`.
"""
