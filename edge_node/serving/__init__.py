"""One request from admission to outcome. Read in this order:

`service` (the table of hops), `generation` (one client's request, the making of one answer, and its sharing between
identical requests), `attempts` (the targets, one after the other), `admission` (rate limit and bounded concurrency).
`costly_signals` is part of some decisions only; `part_encoders` reads the sounds and pictures of a request, `shadow`
asks the other side after an answer, and compares some semantic answers with new ones.
"""
