"""The cloud side: a gateway with OpenAI's surface, job workers, and the Triton servers behind them.

Reading order: `app` (what the gateway consists of; `background` is a worker or pipeline), `core` (what all rooms
share), `http`, `serving`, `dispatch`, `upstreams`; then `admission`, `tiers`, `degradation` and `cache`, which decide
how a request is served, and `parts`, which reads its audio and images. Other ways in: `jobs` and `batches` over
`storage`, `http.sessions` (live ones), `grpc_api`, `streams` with `brokers`. `accounts`, `erasure`, `redis`, `config`,
`observability`, `cli`, `planning`, `triton_server` and `deploy` stand beside these paths.
"""
