"""The test bed of whole processes, and the tools that put load and faults on it.

2 gateways, 2 workers, 1 Redis and 2 real Tritons, one for each of two tiers, all on loopback and started here. Gateways
and workers are the commands that operators start; Triton runs under the product's own launcher, with a model of this
folder:

    journaled   the product's model, which writes each call to a file before it runs it, so that calls are counted
                exactly even when every process is killed
    paced       no weights: a token every `step_s`, `slots` sequences at once, the others wait. Its capacity is set by
                the clock and not by this machine's cores, and its speed can be changed while it runs: it stands in for
                a GPU

`python -m tests.bench` lists the scenarios and runs each: `python -m tests.bench kills --rounds 20`. The module of one
has `add_options(parser)` and `main(options)`, which returns the rows that are judged. `overload`, `slow` and `tenants`
take `--workers 4 --backlog 5000`: they measure once more beside jobs.

Ctrl-C and SIGTERM end a tool with all that it started (`tests/tool.py`).

All figures are measured over HTTP or read from Triton, never from inside the gateway. Reading order: `bed` (the
processes), `client` (one streamed request and its outcome), `load` (many of them), `job_load` (jobs and webhooks),
`backlog` (jobs beside a load), `figures`, then the scenarios.
"""
