"""Observability of the daemon: `metrics` (Prometheus), `logs`, and `tracing` (OpenTelemetry, loaded on demand)."""
