"""Live sessions as requests of the daemon; the sessions themselves are `router.serving.live`.

requests   answers and transcripts, as requests of the service
reply      the answer of a response, as a `ClientReply` of the service
"""
