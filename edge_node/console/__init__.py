"""The device's page at `/console`: it shows decisions as they are made, their reasons, and the effect of other signal
values.
"""
