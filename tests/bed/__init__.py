"""The test bed of whole processes, and the tools that put load and faults on it.

2 gateways, 2 workers, 1 Redis and 2 real Tritons, one for each of two tiers, all on loopback and started here. Gateways
and workers are the commands that operators start; Triton runs under the product's own launcher, with a model of this
folder:

    journaled   the product's model, which writes each call to a file before it runs it, so that calls are counted
                exactly even when every process is killed
    paced       no weights: a token every `step_s`, `slots` sequences at once, the others wait. Its capacity is set by
                the clock and not by this machine's cores, and its speed can be changed while it runs: it stands in for
                a GPU

    python -m tests.bed.kills       kill -9 of each process at random moments, under load
    python -m tests.bed.overload    three times the load that a tier can serve
    python -m tests.bed.slow        one replica of three slow, then hung
    python -m tests.bed.tenants     one of two tenants floods the tier
    python -m tests.bed.fanout      one of two tenants sends few requests with many sequences
    python -m tests.bed.equal       equal requests at two gateways with a shared cache
    python -m tests.bed.scale       1, 2 and 4 endpoints, and back
    python -m tests.bed.outbox      a device that accepts jobs offline and is killed; then its cloud comes back
    python -m tests.bed.job_queues  one of two tenants has 20,000 jobs queued, over its budget and within it

`overload`, `slow` and `tenants` take `--workers 4 --backlog 5000`: they measure once more beside jobs.

    python -m tests.bed.clients     five agent frameworks against one edge daemon
    python -m tests.bed.fleet_polls one control plane, 15,000 parked polls
    python -m tests.bed.fleet       rollouts over thousands of simulated devices and one control plane

`python -m tests.bed.virtual` plays overload, tenants, fan-out and a slow replica in virtual time, without processes.
`python -m tests.bed.ablation` says what each mechanism is worth.

Ctrl-C and SIGTERM end a tool with all that it started (`tests/tool.py`).

All figures are measured over HTTP or read from Triton, never from inside the gateway. Reading order: `bed` (the
processes), `client` (one streamed request and its outcome), `load` (many of them), `job_load` (jobs and webhooks),
`backlog` (jobs beside a load), `figures`, then the tools.
"""
