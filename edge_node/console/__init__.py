"""The device's page at `/console`: decisions as they are made, their reasons, and what another signal would change."""
