"""The fleet: checking policies and running their test cases."""
