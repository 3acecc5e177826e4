"""What the processes of daemon, gateway and control plane share: the only room of router that touches sockets.

    bytes → handler    listener        sockets, connections, limits, drain
                       request         path, method, headers, a bounded body, multipart uploads
    reply → bytes      reply           what takes an answer, for one request or for several (single flight)
                       responses       the answer over HTTP, whole or streamed
    other ways         live            sessions over WebSocket
                       webhooks        notices of jobs, until their receivers take them
                       console         what the pages of device and fleet share
    the process        logs, metrics   the log; counters, histograms; otel: names of spans, and their export
                       process         questions at the terminal, the event loop, Python and the kernel
                       folders         folders and files of data

It knows HTTP and the answers of router, and no storage: what differs between the three is an argument. Nothing else in
router imports it.
"""
