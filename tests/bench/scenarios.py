"""The scenarios that `python -m tests.bench NAME` runs, and what each is about.

A scenario is a module with `add_options(parser)` and `main(options) -> list[Row]`, or `async def main`. A program has
its own `main()`, which reads its arguments itself and returns its exit status.
"""

from __future__ import annotations

from typing import NamedTuple


class Tool(NamedTuple):
    module: str  # below `tests`
    about: str


SCENARIOS = {
    "abandoned": Tool("bed.abandoned", "streams that clients leave cost what was generated"),
    "ablation": Tool("bed.ablation", "what each mechanism is worth, in a scenario or in virtual time"),
    "agents": Tool("bed.agents", "agents in sessions at a device, under faults"),
    "clients": Tool("bed.clients.__main__", "agent frameworks and official clients against one edge daemon"),
    "contract": Tool("bench.simulation.contract", "promises of quality on generated streams, beside an oracle"),
    "clouds": Tool("bed.clouds", "a device with three clouds, of which one and two are cut under load"),
    "day": Tool("bench.day", "a day of two hours with real models: promise, budget, battery, cuts and a kill"),
    "dialects": Tool("bench.dialects", "CPU of a Messages request over a chat request's, at edge and gateway"),
    "equal": Tool("bed.equal", "equal requests at two gateways with a shared cache"),
    "fanout": Tool("bed.fanout", "one of two tenants sends few requests with many sequences"),
    "fleet-polls": Tool("bed.fleet_polls", "one control plane, 15,000 parked polls"),
    "floods": Tool("bed.floods", "one tenant floods a gateway in every way that needs no GPU"),
    "graded": Tool("bench.graded", "a budget and a promise on questions that two real models answered"),
    "gateway-cpu": Tool("bench.gateway_cpu", "CPU of the gateway a request and a token, beside another version of it"),
    "hostile-files": Tool("bed.hostile_files", "hostile audio, images and files through both daemons"),
    "http-upstream": Tool("bench.http_upstream", "what the gateway adds before a server with OpenAI's HTTP API"),
    "job-queues": Tool("bed.job_queues", "one of two tenants has 20,000 jobs queued, over its budget and within it"),
    "kills": Tool("bed.kills", "kill -9 of each process at random moments, under load"),
    "mqtt": Tool("bed.mqtt", "messages of a broker as jobs, under kills"),
    "outbox": Tool("bed.outbox", "a device accepts jobs offline and is killed; then its cloud comes back"),
    "overload": Tool("bed.overload", "three times the load that a tier can serve"),
    "prefix": Tool("bench.prefix", "endpoints chosen by prefixes, on a trace of conversations, in virtual time"),
    "rollouts": Tool("bed.fleet.__main__", "rollouts over thousands of simulated devices and one control plane"),
    "refit": Tool("bench.simulation.refits", "refits of a pair's calibration on generated streams, under a promise"),
    "residency": Tool("bed.residency", "requests bound to one of two regions, under cuts and faults"),
    "ledger": Tool("bed.ledger", "egress ledgers under kills of their writers, and under tampering"),
    "scale": Tool("bed.scale", "1, 2 and 4 endpoints, and back"),
    "schemas": Tool("bed.schemas", "schemas against the answers that their grammars allow"),
    "schemas-served": Tool("bed.schemas_served", "answers under generated schemas, through a daemon and a gateway"),
    "sessions": Tool("bed.sessions", "live sessions: memory of idle ones, interruptions, cuts"),
    "slow": Tool("bed.slow", "one replica of three slow, then hung"),
    "soak": Tool("bench.soak", "mixed load on the whole stack"),
    "streams": Tool("bed.streams", "pipelines of a broker under kills, and their goodput"),
    "tenants": Tool("bed.tenants", "one of two tenants floods the tier"),
    "upstreams": Tool("bed.upstreams", "a real vLLM, llama_cpp.server and two Tritons, each killed under load"),
    "virtual": Tool("bed.virtual", "the beds in virtual time, without processes"),
}
PROGRAMS = {
    "edge-ablation": Tool("bench.edge_ablation", "what each shortcut of the edge's HTTP side is worth"),
    "hops": Tool("bench.hops", "the files of ours that one request passes"),
    "kv-types": Tool("bench.decoding.kv_types", "keys and values at q8_0 beside f16"),
    "load-tools": Tool("bench.load_tools", "our load tool beside aiperf and guidellm, at an edge and a gateway"),
    "parts": Tool("bench.parts.__main__", "what a request with audio and an image costs"),
    "peers": Tool("bench.peers.__main__", "our edge beside Envoy, vllm-router, SMG, nginx and LiteLLM"),
    "profile": Tool("bench.edge_profile", "how the edge's mechanisms share the processor time of a request"),
    "real-weights": Tool("bench.decoding.real_weights", "the engine on real weights beside servers of llama.cpp"),
    "simulation": Tool("bench.simulation.__main__", "error rates of the verdict, times of reverts, loads for a fleet"),
    "variants": Tool("bench.simulation.variants", "how soon a worse variant of a model is returned, and an equal one"),
    "voice": Tool("bench.voice.__main__", "spoken commands on the device"),
}
