"""`causeway-edge up`. Read `session` first; it runs programs (`child_process`) and asks demo questions (`tour`)."""
