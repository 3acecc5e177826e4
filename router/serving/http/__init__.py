"""HTTP/1.1 below the listener: sockets and their addresses, plain requests and the connections that read them, and
aiohttp's connection for all other requests.
"""
