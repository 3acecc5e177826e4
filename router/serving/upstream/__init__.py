"""The client of an OpenAI-compatible server, which the device's cloud and the gateway's tiers share.

    server      the connections to one base URL, its bearer key, requests in OpenAI's format, and streamed answers
    responses   whole answers and errors; failures are translated to router.errors

Which server is asked, how often and for how long, and what a failure means for the next request, is the caller's.
"""
