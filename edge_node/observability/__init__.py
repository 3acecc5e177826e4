"""What the daemon reports: `metrics` (Prometheus), `logs`, and `tracing` (OpenTelemetry, loaded on demand)."""
