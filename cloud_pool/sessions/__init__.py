"""Live sessions as requests of the gateway; the sessions themselves are `router.serving.live`.

requests   answers and transcripts, as requests of the tenant
delivery   the answer of a response, as events
"""
