"""What a process remembers of its targets and its costs: circuit breaker, latency, spending.

Time is an argument, and memory is bounded.
"""
