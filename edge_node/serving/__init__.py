"""A request from admission to outcome. Read in this order:

`service` (the table of hops), `requests` (one client's request: rate limit, bounded concurrency, context, and the
generation that identical requests share), `generation` (the making of one answer by the targets, one after the other).
`on_demand_signals` computes signals that only some decisions need; `part_encoders` reads the audio and images of a
request, `shadow` asks the other side after an answer, and compares some semantic answers with new ones.
"""
