"""The device's agent in a fleet. It verifies every published file before using it, and installs bundles."""
