"""Tests tell behaviour: fake clock, real bytes, real parts."""
