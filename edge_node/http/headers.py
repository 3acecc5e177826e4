"""The headers of the daemon's HTTP API. The reference in ``edge_node/README.md`` is generated from these tables."""

from __future__ import annotations

from collections.abc import Mapping

REQUEST_HEADERS: Mapping[str, str] = {
    "Authorization": "`Bearer KEY`; required if `server.keys` is set",
    "x-causeway-prefer": "`prefer_on_device`, `only_on_device`, `prefer_cloud` or `only_cloud`; "
    "narrows the policy, never widens it",
    "x-causeway-tags": "tags for the policy's rules, separated by commas; at most 32 tags of at most 64 characters; "
    "case does not count",
    "x-causeway-deadline-ms": "time left for this request, milliseconds",
    "x-causeway-priority": "priority of a job: `interactive`, `standard` or `bulk`",
    "Prefer": "`respond-async, wait=SECONDS` (RFC 7240): a request that takes longer becomes a job",
    "Idempotency-Key": "of a job: the same request with the same key is the same job",
    "traceparent": "W3C trace context of the client",
}

RESPONSE_HEADERS: Mapping[str, str] = {
    "x-causeway-decision": "id of the decision record, see `GET /v1/decisions/{id}`",
    "x-causeway-route": "where the answer came from: `edge`, `cloud` or `cache`",
    "x-causeway-target": "name of the policy's target that made the answer",
    "x-causeway-reason": "name of the rule that chose the target, or `fallback: CODE`, `handoff: CODE`, `cache`, "
    "`stale: CODE`, `model_named`, `continued`",
    "x-causeway-cache": "`hit`; `semantic` (the answer to a question that means the same); `stale` (an old answer "
    "after an error); `miss`; `coalesced` (shared with an identical request in progress); `bypass` (the policy allows "
    "no caching)",
    "x-causeway-cache-reason": "why the cache was bypassed; only with `x-causeway-cache: bypass`",
    "x-causeway-policy": "`name@revision` of the active policy",
    "x-causeway-degraded": "`true` if the answer is second choice: a fallback, a stale answer or a lower cloud tier",
    "x-causeway-modalities": "what became of the parts that the target got as text or soft tokens, such as "
    "`audio=ok,image=timeout`: `ok`, `timeout`, `failed`, or `skipped` (the policy waits for the first branch only); "
    "of parts that a cloud target got, what our gateway says",
    "x-causeway-loosened": "offered tools, separated by commas, whose arguments are not held to their schemas, "
    "because a keyword cannot be; the decision record names it",
    "x-request-id": "same as `x-causeway-decision`; of its own where a request is refused before its decision",
    "Preference-Applied": "`respond-async`: the request was taken as a job",
    "Retry-After": "seconds to wait before a retry, on 429 and 503",
}
