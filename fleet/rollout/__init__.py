"""Rollouts: life, stages, which boxes may change when, the verdict on a stage. Pure: time is an argument."""
