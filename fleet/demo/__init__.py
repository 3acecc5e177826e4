"""The demo `make demo-fleet`: a control plane and real devices, a good rollout, and a bad one that is reverted
automatically.
"""
