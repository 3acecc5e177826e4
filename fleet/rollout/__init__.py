"""Rollouts as pure functions of time: states, stages, permissions of devices to change, and the verdict on a stage."""
