"""Live sessions as requests of the gateway: `requests`. The sessions themselves are `router.serving.live`."""
