# The daemon of a Jetson with its engine on CUDA, from the wheels of `make dist`. It was never built or run:
#   docker build -f edge_node/deploy/edge-l4t.Dockerfile --build-arg BASE=<NGC registry>/nvidia/l4t-jetpack:r38.2.0 \
#       -t causeway/edge-l4t:0.1.0 .
#   docker run --runtime nvidia …, and the rest as in edge.Dockerfile
# BASE: an image of JetPack whose Python is 3.11 or newer, with nvcc: JetPack 7 (Ubuntu 24.04) has 3.12.
ARG BASE
FROM ${BASE} AS build
ARG CUDAARCHS=87
WORKDIR /src
RUN apt-get update && apt-get install -y --no-install-recommends python3-dev python3-venv cmake ninja-build g++ \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -c "import sys; assert sys.version_info >= (3, 11), 'take JetPack 7'" && python3 -m venv /opt/causeway/.venv
COPY edge_node/deploy/requirements.txt ./
RUN /opt/causeway/.venv/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r requirements.txt \
 && /opt/causeway/.venv/bin/pip uninstall --yes z3-solver
# The same version as in the `engine` extra of pyproject.toml.
RUN CMAKE_ARGS="-DGGML_CUDA=on -DGGML_NATIVE=off -DCMAKE_CUDA_ARCHITECTURES=${CUDAARCHS}" \
    /opt/causeway/.venv/bin/pip install --no-cache-dir --no-deps llama-cpp-python==0.3.36
COPY dist/causeway_router-*.whl dist/causeway_sdk-*.whl ./
RUN /opt/causeway/.venv/bin/pip install --no-cache-dir --no-deps --no-index ./*.whl

FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends python3 libgomp1 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/causeway /opt/causeway
ENV PATH=/opt/causeway/.venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    CAUSEWAY_ENCRYPTION__KEY_FILE=/var/lib/causeway-key/state.key
RUN useradd --uid 10001 --no-create-home --home-dir /tmp causeway \
 && install -d -o 10001 -g 10001 -m 700 /var/lib/causeway /var/lib/causeway-key
USER 10001:10001
VOLUME ["/var/lib/causeway", "/var/lib/causeway-key"]
ENTRYPOINT ["causeway-edge"]
CMD ["serve", "--config", "/etc/causeway/edge.yaml", "--state-dir", "/var/lib/causeway"]
