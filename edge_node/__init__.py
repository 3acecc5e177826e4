"""The daemon on the device and its command line.

Read `serving/service.py` first: its docstring is the table of hops of one request. `app.py` wires everything; `http/`,
`serving/` and `backends/` are one request's way in, through and back; `storage/`, `signals/` and `observability/` are
what it reads and writes. Other ways in: `jobs/` (an outbox), `sessions/` (live ones), `mqtt/`; `modalities/` reads and
makes sound, and reads pictures. `daemon/` is start and stop, `config/` the settings, `cli/` the commands, `agent/`
takes bundles of a fleet, `console/` is the page at `/console`.
"""
