"""`causeway-edge up`. Read `session` first; it runs programs (`child_process`) for what `models` chooses and asks."""
