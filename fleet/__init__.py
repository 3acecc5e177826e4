"""The fleet: checks of policies and their test cases, and the control plane that rolls policies and models out to
devices.
"""
