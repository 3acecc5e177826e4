"""Five agent frameworks, and the official clients for TypeScript, against one edge daemon: is each answer of the kind
that was asked for?

    python -m tests.bench clients                          all clients; exits with 1 if a flow failed
    python -m tests.bench clients --client instructor --only "edge: schema"
    python -m tests.bench clients --environments FOLDER    keep the clients' environments there, and use them again

Needs `causeway-models pull demo:qwen-05b`, Node.js 20 with npm, Python's venv, and some minutes. The clients and their
pinned versions are in `environments.py`; they are installed into a temporary folder, never into the environment of the
tree.

The daemon is `causeway-edge serve` with two targets. `edge` is the Qwen 0.5B on the device: there the constraint is
ours (a schema as the response format, a forced or required tool), so each answer has to be of the type that the client
was asked for, at the first attempt: retries are off. `scripted` is a scripted model behind an OpenAI-compatible server
(`upstream.py`): modes without a constraint, tool loops, hand-overs and second turns, where it refuses histories with
repeated or unanswered call ids.

A flow is `green`; `weak` where the object is valid and its values are not those of the text, which is the model's
affair; `client` where the client's own check asks for more than the schema that it sent; or `failed`. One program per
client is in `programs/`, each runs with the address of a server:

    FOLDER/instructor/bin/python tests/bed/clients/programs/with_instructor.py http://127.0.0.1:8080/v1
"""
