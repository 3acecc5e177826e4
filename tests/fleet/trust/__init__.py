"""Keys, roles and signatures of a fleet, and the attacks that a device refuses."""
