"""One request from admission to outcome. Read in this order:

`service` (the table of hops), `request_context` (one client's request), `generation` (the making of one answer, and its
sharing between identical requests), `attempts` (the targets, one after the other), `admission` (rate limit and bounded
concurrency), `reply` (the interface between serving and HTTP).
"""
