"""Live sessions as requests of the daemon: `requests`. The sessions themselves are `router.serving.live`."""
