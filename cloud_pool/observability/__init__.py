"""What the gateway and the workers show of themselves.

`metrics` (the Prometheus registry, and the time that the process lost), `tracing` (the protocol) with `otel_tracing`
(its only implementation, loaded on demand).
"""
