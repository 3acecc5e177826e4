"""Who goes into a tier, who waits here, and who is turned away: before anything is rendered, tokenised or sent.

The queue is ours and not Triton's, whose queue timeouts fire late and whose limits stall a single instance.

    admission   waiters and their deadlines, around the turnstile: `async with admission.place(…) as place`
    turnstile   the decision for each event: in, waiting, or turned away
    places      who has one, who may have one of the last, and who gives his back
    limit       how many may be in Triton at once, found from times to first token
    fair        turns between tenants inside a priority, by the tokens that they use
    overload    when a queue stands, and what is shed for it
    drain       how fast places come free, for waits and Retry-After
    ticket      one request at the door
    peers       the places of several gateways, divided
    heartbeat   what they tell each other for that, through Redis
    lag         time that this process lost itself, and no tier is to blame for
    settings    the tier's key `admission`
    metrics     for Prometheus

All but `admission`, `heartbeat` and `lag` are pure: `now` is an argument.
"""

from .config import AdmissionConfig, AdmissionSettings
from .controller import AdmissionController, Permit, Preempted
from .ticket import RANK, Priority

__all__ = ["RANK", "AdmissionConfig", "AdmissionController", "AdmissionSettings", "Permit", "Preempted", "Priority"]
