"""What the daemon reports: `metrics` (Prometheus) and `tracing` (OpenTelemetry, loaded on demand)."""
