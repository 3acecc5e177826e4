"""HTTP at the gateway: OpenAI's surface before the service.

Reading order: `server` (addresses, paths, errors, and the routes that generate; the sockets are
`router.serving.listener`), `request_admission` (headers, body and limits), `request_runner` (one outcome per request),
`transcription_routes`, `sessions` (the requests of live sessions, which are `router.serving.live`), `info_routes`
(models, health and readiness), `operator` (metrics and operators' calls, on an address of their own).
"""
