# The control plane:  docker build -f fleet/deploy/fleet.Dockerfile -t causeway/fleet:0.1.0 .
# BASE: any Debian or Ubuntu with Python 3.11 or newer, its venv and CA certificates.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
WORKDIR /src
RUN python3 -m venv /opt/venv
# Packages first, pinned by hash: they change less often than the code.
COPY edge_node/deploy/requirements.txt edge_node/deploy/requirements-build.txt ./
RUN /opt/venv/bin/pip install --no-cache-dir --require-hashes -r requirements-build.txt \
 && /opt/venv/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r requirements.txt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY router router
COPY models models
COPY fleet fleet
COPY edge_node edge_node
COPY cloud_pool cloud_pool
COPY policies policies
RUN /opt/venv/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM ${BASE}
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN useradd --uid 10001 --no-create-home --home-dir /tmp causeway \
 && install -d -o 10001 -g 10001 -m 700 /var/lib/causeway
USER 10001:10001
EXPOSE 8090
# Volumes: the fleet's folder, into whose `published` the control plane writes, the keys of the online roles, its state.
ENTRYPOINT ["causeway-fleet"]
CMD ["serve", "/fleet", "--keys", "/keys", "--state-dir", "/var/lib/causeway", "--listen", "0.0.0.0:8090"]
