"""The device's page `/console`: decisions as they are made, their reasons, and what-if signals."""
