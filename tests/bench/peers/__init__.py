"""Our edge beside other proxies: what they cost a request, a stream and in memory, one server on one core."""
