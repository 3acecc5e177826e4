"""Tests of what-if over recorded decisions."""
