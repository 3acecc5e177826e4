"""Admission: the requests that enter a tier, wait or are shed, before anything is rendered, tokenised or sent.

The queue is ours and not Triton's, whose queue timeouts fire late and whose limits stall a single instance.

Reading order:

    scheduler           one decision for each event: admitted, waiting or shed
    waiting             the tickets that wait: turns between tenants, and which make room in a full queue
    permits             which tickets hold a permit, which may have one of the last, which give theirs back
    concurrency_limit   how many sequences may be in Triton at once, how fast they leave, and when a queue stands
    controller          the waiters and their deadlines: `async with admission.acquire(…) as permits`; Prometheus
    division            a tier's permits divided between gateways and workers
    peer_heartbeat      what they tell each other through Redis, and the endpoints that the permits follow

Everything but `controller` and `peer_heartbeat` is pure: `now` is an argument.
"""

from causeway_server.router.jobs.submission import RANK
from causeway_server.router.types import Priority

from .controller import AdmissionController, Permit, Preempted
from .permits import AdmissionConfig, AdmissionSettings

__all__ = ["RANK", "AdmissionConfig", "AdmissionController", "AdmissionSettings", "Permit", "Preempted", "Priority"]
