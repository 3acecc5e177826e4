"""The command `causeway-edge up`. Start at `session`: it runs the programs (`child_process`) for `models`."""
