"""Single-flight: identical requests in progress share one generation.

`shared_generation` (a generation and its subscribers on this gateway), `leader` (generates under a lease), `follower`
(reads the stream of a leader on another gateway), `reply` (what one request learns), `resume` (restarted answers).
"""
