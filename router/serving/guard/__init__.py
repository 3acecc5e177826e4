"""The guard of requests in servers: `runner` runs the detectors of `router.guard`, bounded in time."""
