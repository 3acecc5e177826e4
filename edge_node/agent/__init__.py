"""The device's side of the fleet: verifies everything that the fleet publishes before using it."""
