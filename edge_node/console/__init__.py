"""The device's page at `/console`: decisions as they are made, their reasons, and the effect of other signal values."""
