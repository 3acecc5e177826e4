"""What the gateway and the workers show of themselves.

`metrics` (the Prometheus registry), `tracing` (the protocol) with `otel_tracing` (its only implementation,
loaded on demand), and `event_loop_lag` (time that this process lost).
"""
