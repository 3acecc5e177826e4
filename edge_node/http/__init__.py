"""HTTP/1.1 in and out. Read in this order:

`router.serving.listener` (sockets, limits, which web pages may ask), `api` (paths, bytes → Request, answers),
`router.serving.responses` (pieces → bytes), `inspection` (models, past decisions, health, metrics).
"""
