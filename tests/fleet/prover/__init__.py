"""Tests of the proofs about policies."""
