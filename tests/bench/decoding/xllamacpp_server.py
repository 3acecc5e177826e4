"""llama.cpp's own server, of today: `xllamacpp_server.py MODEL THREADS STREAMS --port PORT` (MIT, package xllamacpp).

Its cache of prompts is on, as by default; the context is 2,048 tokens a stream.
"""

from __future__ import annotations

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("threads", type=int)
    parser.add_argument("streams", type=int)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.port = arguments.model, arguments.port
    params.n_parallel, params.n_ctx = arguments.streams, 2048 * arguments.streams
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = arguments.threads
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
