"""Whole answers, one after the other: a load generator and bare servers."""
