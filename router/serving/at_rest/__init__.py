"""Content at rest: its encrypted form at gateways and devices, and the keys of a device's state folder.

sealing      AES-256-GCM, bound to a place
state_keys   data keys, sealed with a key that is outside of the folder
"""
