"""Rollouts: life, stages, which devices may change when, the verdict on a stage. Pure: time is an argument."""
