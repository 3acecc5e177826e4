"""The Prometheus registry and time lost by the loop (`metrics`); OpenTelemetry, loaded on demand (`tracing`)."""
