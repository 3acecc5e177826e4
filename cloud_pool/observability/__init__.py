"""What the gateway and the workers show of themselves.

`metrics` (the Prometheus registry, and the time that the process lost) and `tracing` (OpenTelemetry, loaded on demand).
"""
