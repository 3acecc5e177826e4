"""HTTP at the gateway: OpenAI's surface before the service.

Reading order: `listener` (addresses; their sockets are `router.serving.listener`), `server` (paths and errors),
`generation_routes` with `request_runner` (one outcome per request), `request_admission` with `request_reader` (headers
and body), `transcription_routes`, `info_routes` (models, health) with `readiness`,
`operator` (metrics and operators' calls, on an address of their own).
"""
