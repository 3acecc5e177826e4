"""Bundles: the atomic set of policy, cases, models and settings that a fleet gives to a device, and their assignment.

`manifest` has the format, its ids and the plan of a rollout, `settings` the keys that a fleet may set, and `refusals`
the reasons for which a device refuses an update. The device and the control plane both use them.
"""
