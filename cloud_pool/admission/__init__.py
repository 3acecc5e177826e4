"""Which request may enter a tier, which waits here, and which is shed: before anything is rendered, tokenised or sent.

The queue is ours and not Triton's, whose queue timeouts fire late and whose limits stall a single instance.

Reading order:

    ticket              one sequence in admission, alone or with its request's others
    scheduler           one decision for each event: admitted, waiting or shed
    permits             which tickets hold a permit, which may have one of the last, which give theirs back
    concurrency_limit   how many sequences may be in Triton at once, found from times to first token
    waiting             the tickets that wait, and which make room in a full queue
    fair_queue          turns between tenants within a priority, by tokens used
    overload            when a queue is a standing one, and what is shed for it
    release_rate        how fast permits are released, for waits and Retry-After
    controller          the waiters and their deadlines: `async with admission.acquire(…) as permit`
    division            a tier's permits divided between gateways and workers
    peer_heartbeat      what they tell each other through Redis, and the endpoints that the permits follow
    config, metrics     the tier's key `admission`; Prometheus

Everything but `controller`, `peer_heartbeat` and `metrics` is pure: `now` is an argument.
"""

from .config import AdmissionConfig, AdmissionSettings
from .controller import AdmissionController, Permit, Preempted
from .ticket import RANK, Priority

__all__ = ["RANK", "AdmissionConfig", "AdmissionController", "AdmissionSettings", "Permit", "Preempted", "Priority"]
