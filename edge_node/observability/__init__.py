"""What the daemon reports: `metrics` (Prometheus), `tracing` (OpenTelemetry, loaded on demand) and `logs`."""
