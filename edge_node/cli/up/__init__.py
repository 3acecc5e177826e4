"""The command `causeway-edge up`. Read `session` first: it runs programs (`child_process`) for the chosen `models`."""
