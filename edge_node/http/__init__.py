"""HTTP/1.1 requests and responses. Read in this order:

`router.serving.listener` (sockets, limits, allowed web pages), `api` (paths, bytes → Request, answers),
`router.serving.responses` (pieces → bytes), `inspection` (models, past decisions, health, metrics).
"""
