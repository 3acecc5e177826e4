"""The standard bed and what is done to it.

2 gateways, 2 workers, 1 Redis and 2 real Tritons, one for each of two tiers, all on loopback and started here. Gateways
and workers are the commands that people start; Triton runs under the product's own launcher, with a model of this
folder:

    journaled   the product's model, which notes each call in a file before it runs it, so that calls are counted
                exactly although everything is killed
    paced       no weights: a token every `step_s`, `slots` sequences at once, the rest waiting. Its capacity is set
                by the clock and not by this machine's cores, and it can be made slower while it runs: it stands in
                for a GPU

    python -m tests.bed.kills       kill -9 of each part at random moments, with load running
    python -m tests.bed.overload    three times what the tier can do
    python -m tests.bed.slow        one replica of three slow, or hung
    python -m tests.bed.tenants     one of two tenants floods

What the tools print is measured over HTTP and read from Triton, never from inside the gateway.
"""
