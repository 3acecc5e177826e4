"""Observability of the gateway and the workers.

`metrics` (the Prometheus registry, and time lost by the event loop) and `tracing` (OpenTelemetry, loaded on demand).
"""
