"""Rollouts: life, stages, permissions of devices to change, the verdict on a stage. Pure: time is an argument."""
