"""The cloud side: a gateway with OpenAI's surface, job workers, and the Triton servers behind them.

Reading order: `app` (what the gateway consists of), `http`, `serving`, `dispatch`, `upstreams`; then `admission`,
`balancing`, `degradation` and `cache`, which decide how a request is served; `jobs`, `streams`, `brokers`,
`accounts`, `config`, `observability`, `cli`, `planning`, `triton_server` and `deploy` stand beside that path.
"""
