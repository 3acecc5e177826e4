# The daemon of a device and its engine on the processor, from the wheels of `make dist`:
#   docker build -f edge_node/deploy/edge.Dockerfile -t causeway/edge:0.1.0 .
#   docker run --network host --read-only --tmpfs /tmp -v causeway:/var/lib/causeway -v causeway-key:/var/lib/causeway-key \
#       -v ./edge.yaml:/etc/causeway/edge.yaml:ro causeway/edge:0.1.0
# The daemon listens on loopback, so it shares the device's network. Its state and the key of it are volumes.
# BASE: any Debian or Ubuntu with Python 3.11 or newer, its venv and CA certificates.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
WORKDIR /src
RUN python3 -m venv /opt/causeway/.venv
COPY edge_node/deploy/requirements.txt ./
# Provers are the control plane's, and large.
RUN /opt/causeway/.venv/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r requirements.txt \
 && /opt/causeway/.venv/bin/pip uninstall --yes z3-solver
COPY dist/causeway_router-*.whl dist/causeway_sdk-*.whl dist/llama_cpp_python-*.whl ./
# llama.cpp's wheel of this processor: there may be one for another.
RUN /opt/causeway/.venv/bin/pip install --no-cache-dir --no-deps --no-index \
    causeway_router-*.whl causeway_sdk-*.whl llama_cpp_python-*_"$(uname -m)".whl

FROM ${BASE}
COPY --from=build /opt/causeway /opt/causeway
ENV PATH=/opt/causeway/.venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    CAUSEWAY_ENCRYPTION__KEY_FILE=/var/lib/causeway-key/state.key
RUN useradd --uid 10001 --no-create-home --home-dir /tmp causeway \
 && install -d -o 10001 -g 10001 -m 700 /var/lib/causeway /var/lib/causeway-key
USER 10001:10001
VOLUME ["/var/lib/causeway", "/var/lib/causeway-key"]
ENTRYPOINT ["causeway-edge"]
CMD ["serve", "--config", "/etc/causeway/edge.yaml", "--state-dir", "/var/lib/causeway"]
