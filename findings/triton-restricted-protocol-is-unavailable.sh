#!/bin/sh
# Triton Inference Server 2.51.0 (PyPI wheel nvidia-pytriton 0.7.0): a call without the key of a restricted protocol
# is answered UNAVAILABLE.
#
# Guess: PERMISSION_DENIED or UNAUTHENTICATED, which gRPC's status page reserves for this, and which no retry policy
# repeats.
# Seen: UNAVAILABLE, "This protocol is restricted, expecting header 'triton-grpc-protocol-…'". By that page UNAVAILABLE
# is "most likely a transient condition, which can be corrected by retrying": a client with the usual retry policy asks
# again until it gives up, and a health check takes the server for one that is down. The same call with the header
# succeeds.
set -eu
folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null; rm -rf "$folder"' EXIT INT TERM
python3 -m venv "$folder/triton"
"$folder/triton/bin/pip" install --quiet --no-deps nvidia-pytriton==0.7.0 'numpy==1.26.4'
python3 -m venv "$folder/client"
"$folder/client/bin/pip" install --quiet 'tritonclient[grpc]==2.73.0'
packages=$(echo "$folder"/triton/lib/python3*/site-packages)
python_lib=$(python3 -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))')
mkdir "$folder/models"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
LD_LIBRARY_PATH="$packages/nvidia_pytriton.libs:$python_lib" "$packages/pytriton/tritonserver/bin/tritonserver" \
    --model-repository="$folder/models" --model-control-mode=explicit --allow-http=false --allow-metrics=false \
    --grpc-address=127.0.0.1 --grpc-port="$port" --grpc-restricted-protocol=model-repository:finding=value \
    >"$folder/log" 2>&1 &
server=$!
"$folder/client/bin/python" - "$port" <<'PYTHON'
import sys
import time

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

channel = grpc.insecure_channel(f"127.0.0.1:{sys.argv[1]}")
grpc.channel_ready_future(channel).result(timeout=60)
stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
request = service_pb2.RepositoryIndexRequest()
for header in ("", "another"):
    metadata = (("triton-grpc-protocol-finding", header),) if header else ()
    try:
        stub.RepositoryIndex(request, metadata=metadata, timeout=10)
    except grpc.RpcError as error:
        print(f"header {header!r}: {error.code().name}: {error.details()}")
        assert error.code() is grpc.StatusCode.UNAVAILABLE
    else:
        raise AssertionError("the protocol is not restricted")
index = stub.RepositoryIndex(request, metadata=(("triton-grpc-protocol-finding", "value"),), timeout=10)
print(f"header 'value': OK, {len(index.models)} models")
version = stub.ServerMetadata(service_pb2.ServerMetadataRequest(), timeout=10).version
print(f"Triton {version}")
assert version == "2.51.0"
PYTHON
