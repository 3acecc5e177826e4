# Triton with our engine on CUDA:  docker build -f cloud_pool/deploy/triton.Dockerfile -t causeway/triton:0.1.0 \
#     --build-arg TRITON=<NGC registry>/nvidia/tritonserver:25.03-py3 .
# Any release from 24.11 on works if its Python is 3.11 or newer: the Python backend's stub is built for that Python.
ARG TRITON=nvidia/tritonserver:25.03-py3
ARG CUDA=nvidia/cuda:12.8.1-devel-ubuntu24.04

FROM ${CUDA} AS engine
RUN apt-get update && apt-get install -y --no-install-recommends python3-dev python3-venv cmake ninja-build git \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/build && /opt/build/bin/pip install --no-cache-dir wheel
# The same version as in the `engine` extra of pyproject.toml.
RUN CMAKE_ARGS="-DGGML_CUDA=on -DGGML_NATIVE=off" \
    /opt/build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels llama-cpp-python==0.3.36

FROM ${TRITON}
WORKDIR /src
COPY --from=engine /wheels /wheels
COPY edge_node/deploy/requirements.txt edge_node/deploy/requirements-build.txt ./
COPY pyproject.toml setup.py README.md LICENSE ./
COPY router router
COPY models models
COPY fleet fleet
COPY edge_node edge_node
COPY cloud_pool cloud_pool
COPY policies policies
# Install into the image's own Python, where the backend's stub looks for packages. numpy stays below 2: with 2 and newer
# Triton's Python backend may answer with empty tensors.
RUN python3 -c "import sys; assert sys.version_info >= (3, 11), 'take a newer Triton release'" \
 && pip install --no-cache-dir --break-system-packages --require-hashes -r requirements-build.txt \
 && pip install --no-cache-dir --break-system-packages --require-hashes -r requirements.txt \
 && pip install --no-cache-dir --break-system-packages "numpy<2" diskcache /wheels/*.whl \
 && pip install --no-cache-dir --break-system-packages --no-deps --no-build-isolation . \
 && rm -rf /src/* /wheels
# The file that `make setup` writes for the wheel's Triton, here for the image's.
RUN mkdir -p /opt/causeway && printf '%s\n' \
    '{"server": "/opt/tritonserver/bin/tritonserver", "backend_directory": "/opt/tritonserver/backends",' \
    ' "library_path": ["/opt/tritonserver/lib"], "path": "/usr/local/bin:/usr/bin:/bin"}' > /opt/causeway/triton.json
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 CAUSEWAY_TRITON_ENV=/opt/causeway
RUN useradd --uid 10001 --no-create-home --home-dir /tmp causeway
USER 10001:10001
EXPOSE 8001 8002
# On loopback: give --host, and a --key-file that the gateways share, where they are elsewhere.
ENTRYPOINT ["causeway-cloud"]
CMD ["triton", "--gpu-layers", "-1"]
