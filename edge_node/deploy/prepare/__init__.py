"""Sets a checkout up: `python3 -m edge_node.deploy.prepare run|test|quick|check|bench|train|lock`.

It runs before anything is installed, on the system's Python, so it uses the standard library only and its grammar
stays old enough (3.8) to tell an old Python what it needs instead of failing on it.

A set-up is a list of steps (`plan`). Each step knows a key, a hash of all that its result depends on, and after its
work leaves that key as a stamp; a step whose stamp still fits is passed over, so a second run costs a few
milliseconds and an interrupted one carries on where it was. What takes long is compiled once per machine and kept in
a cache outside the checkout (`llama`).
"""
