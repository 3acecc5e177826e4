"""The device's side of the fleet: what the fleet says is verified here before anything of it is used."""
