"""The cloud side: a gateway with OpenAI's surface, job workers, and the Triton servers behind them.

Reading order: `app` (the parts of a gateway; `background` has those of a worker or pipeline), `core` (types that all
rooms share), `http`, `serving`, `dispatch`, `upstreams`; then `admission`, `tiers`, `degradation` and `cache`, which
decide how a request is served, and `parts`, which reads its audio and images. Requests also come from `jobs` and
`batches` over `storage`, `http.sessions` (live sessions), `grpc_api`, and `streams` with `brokers`. `accounts`,
`erasure`, `redis`, `config`, `observability`, `cli`, `triton_server` and `deploy` support all of these.
"""
