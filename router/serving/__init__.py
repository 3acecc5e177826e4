"""The shared server code of daemon, gateway and control plane: the only room of router that touches sockets.

    bytes → handler    listener        sockets, connections, limits, drain
                       request         path, method, headers, a bounded body, multipart uploads
    reply → bytes      reply           the receiver of an answer, for one request or several (single flight)
                       responses       the answer over HTTP, whole or streamed
    servers            http_client     an HTTP/1.1 client; upstream: an OpenAI-compatible server, by it
    other ways         live            sessions over WebSocket
                       webhooks        notices of jobs, until their receivers take them
                       console         the shared files of the pages of device and fleet
    identity           issuers         tokens of an owner's OpenID Connect issuers
    the process        logs, metrics   the log; counters, histograms; otel: names of spans, and their export
                       process         questions at the terminal, the event loop, Python and the kernel
                       folders         folders and files of data; at_rest: their encryption

It knows HTTP and the answers of router, but no storage; differences between the three are arguments. Nothing else in
router imports it.
"""
