"""The manifests against Kubernetes' schemas, against each other and against what we ship."""

from __future__ import annotations

import ipaddress
import re
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.admission.controller import AdmissionMetrics
from causeway_server.cloud_pool.cli.main import main
from causeway_server.cloud_pool.config import Flags, load_config
from causeway_server.cloud_pool.jobs.metrics import JobMetrics
from causeway_server.cloud_pool.observability.metrics import Metrics
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.upstreams.triton.model_control import restriction
from causeway_server.fleet.cli.commands import main as fleet_main

from .manifests import (
    FLEET,
    FOLDER,
    ROOT,
    Manifest,
    build,
    containers,
    identity,
    labels,
    metric_names,
    named_ports,
    of_kind,
    pod,
    read,
    selects,
    workloads,
)

pytestmark = pytest.mark.slow

POOL = {name: FOLDER / name for name in ("base", "keda", "vllm", "monitoring", "ingress")}
CONTROL = {f"fleet-{name}": FLEET / name for name in ("base", "monitoring", "ingress")}
BUILDS = {name: build(folder) for name, folder in {**POOL, **CONTROL}.items()}
ALL = [each for manifests in BUILDS.values() for each in manifests]
SLOW = pytest.mark.slow
SCALERS = ("HorizontalPodAutoscaler", "ScaledObject")
EVERY_BUILD = pytest.mark.parametrize("manifests", BUILDS.values(), ids=BUILDS)
EVERY_POOL = pytest.mark.parametrize("manifests", [BUILDS[name] for name in POOL], ids=POOL)
# What an operator makes beforehand, as the kustomizations say.
GIVEN = {
    ("Secret", "causeway-redis"),
    ("Secret", "causeway-triton"),
    ("Secret", "causeway-operators"),
    ("Secret", "causeway-prometheus"),
    ("ConfigMap", "causeway-keys"),
    ("ConfigMap", "causeway-llama-template"),
    ("Secret", "fleet-keys"),
    ("Secret", "fleet-postgres"),
}
# What Triton exports itself, where it has a GPU.
TRITONS_OWN = {"nv_gpu_utilization"}
MONITORING = FOLDER.parent / "monitoring"
# What the rules of the forecast record.
FORECAST = {"causeway_forecast_replicas"}


def exported() -> set[str]:
    """Return the series that a gateway and a worker export."""
    registry = CollectorRegistry()
    JobMetrics(registry)
    AdmissionMetrics(registry)
    families = [*Metrics().registry.collect(), *registry.collect()]
    return {f.name + ("_total" if f.type == "counter" else "") for f in families}


@pytest.mark.parametrize("version", [pytest.param("1.29", marks=SLOW), pytest.param("1.32", marks=SLOW), "1.37"])
@EVERY_BUILD
def test_manifests_match_kubernetes_schemas(manifests: list[Manifest], version: str) -> None:
    core = [each for each in manifests if not each["apiVersion"].startswith(("keda.sh/", "monitoring.coreos.com/"))]
    assert len(core) > 12
    for each in core:
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
@pytest.mark.parametrize("name", BUILDS)
def test_kustomize_builds_the_same(name: str) -> None:
    built = subprocess.run(["kubectl", "kustomize", (POOL | CONTROL)[name]], capture_output=True, text=True, check=True)
    made = list(yaml.safe_load_all(built.stdout))
    assert sorted(map(identity, made)) == sorted(map(identity, BUILDS[name]))
    images = [c["image"] for each in workloads(made) for c in pod(each)["containers"]]
    assert sorted(images) == sorted(c["image"] for each in workloads(BUILDS[name]) for c in pod(each)["containers"])


@EVERY_BUILD
def test_every_image_has_a_tag(manifests: list[Manifest]) -> None:
    for each in workloads(manifests):
        for container in containers(each):
            assert re.fullmatch(r"[a-z/]+:[0-9][\w.-]*", container["image"])


def test_the_validation_rejects_wrong_keys_and_types() -> None:
    for wrong in ({"replicaz": 1}, {"replicas": "two"}):
        (gateway,) = [each for each in BUILDS["base"] if identity(each)[1::2] == ("Deployment", "gateway")]
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**gateway, "spec": {**gateway["spec"], **wrong}}, "1.32", strict=True)


def test_every_manifest_file_is_in_a_kustomization() -> None:
    listed = set()
    for file in (*FOLDER.rglob("kustomization.yaml"), *FLEET.rglob("kustomization.yaml")):
        listed |= {(file.parent / name).resolve() for name in read(file)[0]["resources"]}
        for name in read(file)[0]["resources"]:
            # kustomize refuses a resource that holds the folder it is named from: it would be a cycle.
            assert not file.parent.resolve().is_relative_to((file.parent / name).resolve())
    found = (path.resolve() for folder in (FOLDER, FLEET) for path in folder.rglob("*.yaml"))
    files = {path for path in found if path.name != "kustomization.yaml"}
    assert files <= listed


@EVERY_BUILD
def test_names_are_unique_and_in_one_namespace(manifests: list[Manifest]) -> None:
    names = [identity(each) for each in manifests]
    assert len(names) == len(set(names))
    (namespace,) = [each["metadata"]["name"] for each in manifests if each["kind"] == "Namespace"]
    assert {each["metadata"].get("namespace") for each in manifests if each["kind"] != "Namespace"} == {namespace}


@EVERY_BUILD
def test_selectors_find_their_pods(manifests: list[Manifest]) -> None:
    pods = {each["metadata"]["name"]: labels(each) for each in workloads(manifests)}
    for each in workloads(manifests):
        assert selects(each["spec"]["selector"], labels(each))
        for spread in pod(each).get("topologySpreadConstraints", ()):
            assert selects(spread["labelSelector"], labels(each))
    for each in of_kind(manifests, "Service", "PodDisruptionBudget"):
        found = [name for name, its in pods.items() if selects(each["spec"]["selector"], its)]
        assert found == [each["metadata"]["name"]]
    for each in of_kind(manifests, "NetworkPolicy"):
        assert any(selects(each["spec"]["podSelector"], its) for its in pods.values()), identity(each)
        for rule in (*each["spec"].get("ingress", ()), *each["spec"].get("egress", ())):
            for peer in (*rule.get("from", ()), *rule.get("to", ())):
                if "podSelector" in peer and "namespaceSelector" not in peer:
                    assert any(selects(peer["podSelector"], its) for its in pods.values()), identity(each)


@EVERY_BUILD
def test_every_workload_has_a_disruption_budget(manifests: list[Manifest]) -> None:
    budgets = of_kind(manifests, "PodDisruptionBudget")
    for each in workloads(manifests):
        (budget,) = [one for one in budgets if selects(one["spec"]["selector"], labels(each))]
        assert budget["spec"]["maxUnavailable"] < max(2, each["spec"]["replicas"])


@EVERY_BUILD
def test_named_ports_exist(manifests: list[Manifest]) -> None:
    by_name = {each["metadata"]["name"]: each for each in workloads(manifests)}
    for service in of_kind(manifests, "Service"):
        ports = named_ports(by_name[service["metadata"]["name"]])
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports
            if service["spec"].get("clusterIP") == "None":
                assert port["port"] == ports[port["targetPort"]], "a headless service translates no port"
    for each in by_name.values():
        scraped = each["spec"]["template"]["metadata"].get("annotations", {}).get("prometheus.io/port")
        assert scraped is None or int(scraped) in named_ports(each).values()
        for container in pod(each)["containers"]:
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                probe = container.get(kind, {})
                for way in ("httpGet", "tcpSocket"):
                    if way in probe:
                        assert probe[way]["port"] in {port["name"] for port in container["ports"]}


@EVERY_BUILD
def test_network_policies_allow_only_what_is_needed(manifests: list[Manifest]) -> None:
    pods = {each["metadata"]["name"]: each for each in workloads(manifests)}
    policies = of_kind(manifests, "NetworkPolicy")

    def allows(source: str, target: str, port: int) -> bool:
        def side(here: str, there: str, direction: str, key: str) -> bool:
            return any(
                selects(policy["spec"]["podSelector"], labels(pods[here]))
                and any(
                    any(
                        "podSelector" in peer and selects(peer["podSelector"], labels(pods[there]))
                        for peer in rule[key]
                    )
                    and any(each["port"] == port for each in rule["ports"])
                    for rule in policy["spec"].get(direction, ())
                    if key in rule
                )
                for policy in policies
            )

        return side(source, target, "egress", "to") and side(target, source, "ingress", "from")

    tritons = [name for name in pods if name in ("triton", "vllm")]
    wanted = {(a, b, 8001) for a in ("gateway", "worker") for b in tritons}
    wanted |= {(a, "redis", 6379) for a in ("gateway", "worker")}
    wanted = wanted if "triton" in pods else {("fleet", "postgres", 5432)}
    found = {(a, b, port) for a in pods for b in pods for port in named_ports(pods[b]).values() if allows(a, b, port)}
    assert found == wanted


@EVERY_BUILD
def test_a_policy_denies_everything_by_default(manifests: list[Manifest]) -> None:
    (nothing,) = [each for each in manifests if identity(each)[1::2] == ("NetworkPolicy", "nothing")]
    assert nothing["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


@pytest.mark.parametrize(("name", "policy"), [("base", "worker"), ("fleet-base", "fleet")])
def test_webhooks_and_sign_in_reach_public_addresses_only(name: str, policy: str) -> None:
    (found,) = [each for each in BUILDS[name] if identity(each)[1::2] == ("NetworkPolicy", policy)]
    blocks = [peer["ipBlock"] for rule in found["spec"]["egress"] for peer in rule["to"] if "ipBlock" in peer]
    private = ("10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254", "127.0.0.1", "0.0.0.1")
    assert blocks
    for address in (*private, "100.64.0.1"):
        for block in blocks:
            assert any(ipaddress.ip_address(address) in ipaddress.ip_network(each) for each in block["except"])


@EVERY_BUILD
def test_pods_meet_the_restricted_security_standard(manifests: list[Manifest]) -> None:
    accounts = {each["metadata"]["name"]: each for each in of_kind(manifests, "ServiceAccount")}
    for each in workloads(manifests):
        spec = pod(each)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert accounts[spec["serviceAccountName"]]["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        for container in containers(each):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
        assert not [volume for volume in spec.get("volumes", ()) if "hostPath" in volume]


@EVERY_BUILD
def test_containers_have_requests_and_limits(manifests: list[Manifest]) -> None:
    for each in workloads(manifests):
        for container in containers(each):
            requests, limit = container["resources"]["requests"], container["resources"]["limits"]
            assert {"cpu", "memory"} <= set(requests)
            assert "memory" in limit
            assert requests.get("nvidia.com/gpu") == limit.get("nvidia.com/gpu")


@EVERY_BUILD
def test_mounted_objects_exist(manifests: list[Manifest]) -> None:
    there = {(each["kind"], each["metadata"]["name"]) for each in manifests} | GIVEN
    for each in workloads(manifests):
        spec = pod(each)
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        claims = {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", ())}
        for volume in volumes.values():
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in there
            if "secret" in volume:
                assert ("Secret", volume["secret"]["secretName"]) in there
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in there
        for container in containers(each):
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes) | claims
            for variable in container.get("env", ()):
                if "valueFrom" in variable:
                    assert ("Secret", variable["valueFrom"]["secretKeyRef"]["name"]) in there


@EVERY_POOL
def test_autoscalers_scale_existing_workloads_once(manifests: list[Manifest]) -> None:
    replicas = {each["metadata"]["name"]: each["spec"]["replicas"] for each in of_kind(manifests, "Deployment")}
    targets = []
    for each in of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject"):
        name = each["spec"]["scaleTargetRef"]["name"]
        targets.append(name)
        least = each["spec"].get("minReplicas", each["spec"].get("minReplicaCount"))
        most = each["spec"].get("maxReplicas", each["spec"].get("maxReplicaCount"))
        assert least <= replicas[name] <= most
    assert len(targets) == len(set(targets))
    assert {"gateway", "worker", "triton"} <= set(targets)


@EVERY_BUILD
def test_the_model_control_of_each_triton_needs_the_key_of_the_gateways(manifests: list[Manifest]) -> None:
    """Loading a model is running code; gateways and workers reload one that died."""
    for each in workloads(manifests):
        spec = pod(each)
        secrets = {volume["secret"]["secretName"] for volume in spec.get("volumes", ()) if "secret" in volume}
        for container in spec["containers"]:
            if container["name"] in ("gateway", "worker", "triton", "probe"):
                assert "causeway-triton" in secrets
            if container["name"] == "triton":
                words = " ".join(container["args"])
                ours = container["image"].startswith("causeway/")
                assert ("--key-file=/etc/causeway-triton/key" in words) is ours
                assert ("--allow-http=false" in words and restriction("$(TRITON_KEY)") in words) is not ours


def test_autoscaling_metrics_are_exported() -> None:
    known = exported() | TRITONS_OWN | FORECAST
    assert set(re.findall(r"record: (\w+)$", (MONITORING / "forecast.yaml").read_text(), re.MULTILINE)) >= FORECAST
    assert {"causeway_gateway_requests_queued", "causeway_jobs_queued"} <= exported()
    assert set(metric_names(ALL)) <= known
    assert set(metric_names(ALL)) > TRITONS_OWN
    series = re.compile(r"\b(?:causeway|nv)_[a-z_]+")
    queries = [t["metadata"]["query"] for s in of_kind(ALL, "ScaledObject") for t in s["spec"]["triggers"]]
    assert queries
    for query in queries:
        assert set(series.findall(query)) <= known
    rules = set(series.findall((FOLDER / "base" / "autoscaling.yaml").read_text()))
    assert set(metric_names(BUILDS["base"])) <= rules <= known


def test_each_tier_has_a_scaler_that_reads_its_own_queue() -> None:
    """The sum over all tiers would start replicas of one for another's queue."""
    for name, tiers in (("base", {"triton": "assistant-large"}), ("vllm", {"vllm": "llama-70b"})):
        scalers = {each["spec"]["scaleTargetRef"]["name"]: each for each in of_kind(BUILDS[name], *SCALERS)}
        for workload, tier in tiers.items():
            external = [one["external"]["metric"] for one in scalers[workload]["spec"]["metrics"] if "external" in one]
            assert external
            assert [one["selector"]["matchLabels"] for one in external] == [{"tier": tier}] * len(external)
    (triton,) = [each for each in of_kind(BUILDS["keda"], *SCALERS) if each["metadata"]["name"] == "triton"]
    for trigger in triton["spec"]["triggers"]:
        assert re.search(r'\{tier="assistant-large"\}|\{pod=~"triton-\.\+"\}', trigger["metadata"]["query"])


def test_gateways_and_workers_have_the_template_of_the_vllm_tier() -> None:
    """Their pods mount it where the comment of the kustomization says, as vLLM's own do."""
    named = re.search(r"template_file: (/[\w-]+/[\w-]+)/", (FOLDER / "vllm" / "kustomization.yaml").read_text())
    assert named is not None
    for each in workloads(BUILDS["vllm"]):
        if each["metadata"]["name"] in ("gateway", "worker", "vllm"):
            mounts = [mount for one in pod(each)["containers"] for mount in one["volumeMounts"]]
            assert {"name": "template", "mountPath": named[1], "readOnly": True} in mounts


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("monitoring", (MONITORING / "alerts.yaml", MONITORING / "forecast.yaml")),
        ("fleet-monitoring", (FLEET.parent / "monitoring" / "alerts.yaml",)),
    ],
)
def test_prometheus_operator_gets_the_rules_and_finds_the_pods(name: str, files: tuple[Path, ...]) -> None:
    (rules,) = of_kind(BUILDS[name], "PrometheusRule")
    assert rules["spec"]["groups"] == [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    for monitor in of_kind(BUILDS[name], "PodMonitor"):
        found = [each for each in workloads(BUILDS[name]) if selects(monitor["spec"]["selector"], labels(each))]
        assert found
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert all(endpoint["port"] in named_ports(each) for each in found)


@pytest.mark.parametrize(("name", "target"), [("ingress", "gateway"), ("fleet-ingress", "fleet")])
def test_the_ingress_leads_to_the_service_with_a_certificate(name: str, target: str) -> None:
    (ingress,) = of_kind(BUILDS[name], "Ingress")
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    (service,) = [each for each in of_kind(BUILDS[name], "Service") if each["metadata"]["name"] == target]
    assert path["backend"]["service"]["name"] == target
    assert path["backend"]["service"]["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}
    assert [rule["host"]] == ingress["spec"]["tls"][0]["hosts"]


def test_the_control_plane_is_started_with_its_database_and_keys_that_nobody_else_reads() -> None:
    """Files of a Secret are readable by the group, which the control plane refuses: they are copied."""
    (fleet,) = [each for each in workloads(BUILDS["fleet-base"]) if each["metadata"]["name"] == "fleet"]
    prepare, serve = containers(fleet)
    name, folder, *options = serve["args"]
    usage = CliRunner().invoke(fleet_main, [name, "--help"])
    assert usage.exit_code == 0
    values = dict(option.split("=", 1) for option in options)
    assert [option for option in values if option not in usage.output] == []
    mounted = {mount["mountPath"]: mount for mount in serve["volumeMounts"]}
    assert {folder, values["--keys"], str(Path(values["--state-dir"]).parent)} <= set(mounted)
    assert "install -m 600" in prepare["command"][-1]
    assert mounted[values["--keys"]]["name"] in {mount["name"] for mount in prepare["volumeMounts"]}
    (database,) = [each for each in workloads(BUILDS["fleet-base"]) if each["kind"] == "StatefulSet"]
    (postgres,) = pod(database)["containers"]
    environ = {entry["name"]: entry.get("value", "") for entry in postgres["env"]}
    host = f"postgres:{named_ports(database)['postgres']}"
    user, name = environ["POSTGRES_USER"], environ["POSTGRES_DB"]
    assert values["--database"] == f"postgresql://{user}:$(POSTGRES_PASSWORD)@{host}/{name}"


def test_the_copy_of_the_fleet_has_no_private_keys_and_starts_the_pods_at_its_end(tmp_path: Path) -> None:
    """The commands of the page and of the kustomization are the same; a `kubectl` that runs them here is the pod."""
    page = (ROOT / "docs" / "how-to" / "run-a-fleet.md").read_text()
    copy = page[page.index("(cd stores") :].partition("```")[0]
    assert copy in (FLEET / "base" / "kustomization.yaml").read_text().replace("\n#   ", "\n")
    stores, copied = tmp_path / "stores", tmp_path / "copied"
    files = ("fleet.yaml", "keys/server.pub", "published/blobs/ab")
    private = ("keys/server.pem", "tls/ca.key", ".causeway/owner-key/owner.pem", ".causeway/join-token", ".git/config")
    for name in (*files, *private):
        (stores / name).parent.mkdir(parents=True, exist_ok=True)
        (stores / name).touch()
    (stores / "fleet.yaml").write_bytes(bytes(4096))
    copied.mkdir()
    kubectl = tmp_path / "kubectl"
    kubectl.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift\nexec "$@"\n')
    kubectl.chmod(0o755)
    command = re.sub(r" /fleet\b", f" {copied}", copy)
    (fleet,) = [each for each in workloads(BUILDS["fleet-base"]) if each["metadata"]["name"] == "fleet"]
    (marker,) = re.findall(r"until \[ -e /fleet/(\S+) \]", containers(fleet)[0]["command"][-1])
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "pod": "pod/fleet-0"}
    subprocess.run(["sh", "-ec", command], cwd=tmp_path, env=environ, check=True)
    found = {str(path.relative_to(copied)) for path in copied.rglob("*") if path.is_file()}
    assert found == {*files, marker}
    (copied / marker).unlink()
    kubectl.write_text(kubectl.read_text().replace("exec", "head -c 1500 |"))
    cut = subprocess.run(["sh", "-ec", command], cwd=tmp_path, env=environ, capture_output=True, check=False)
    assert cut.returncode == 2
    assert not (copied / marker).exists(), "a copy that was cut off starts nothing"


def test_keda_objects_have_required_fields() -> None:
    found = of_kind(BUILDS["keda"], "ScaledObject")
    assert {each["metadata"]["name"] for each in found} == {"triton", "worker"}
    for each in found:
        assert each["apiVersion"] == "keda.sh/v1alpha1"
        for trigger in each["spec"]["triggers"]:
            assert trigger["type"] == "prometheus"
            assert {"serverAddress", "query", "threshold"} <= set(trigger["metadata"])
            assert all(isinstance(value, str) for value in trigger["metadata"].values())


@EVERY_POOL
def test_commands_and_options_exist(manifests: list[Manifest]) -> None:
    commands = 0
    for each in workloads(manifests):
        for container in pod(each)["containers"]:
            if not container["image"].startswith("causeway/"):
                continue
            name, *arguments = container["args"]
            usage = CliRunner().invoke(main, [name, "--help"])
            assert usage.exit_code == 0, f"causeway-cloud {name}"
            options = {argument.split("=")[0] for argument in arguments if argument.startswith("--")}
            assert [option for option in options if option not in usage.output] == []
            commands += 1
    assert commands >= 4


@EVERY_POOL
def test_configurations_load_and_name_headless_services(manifests: list[Manifest], tmp_path: Path) -> None:
    services = {
        f"{each['metadata']['name']}:{port['port']}"
        for each in of_kind(manifests, "Service")
        for port in each["spec"]["ports"]
        if each["spec"].get("clusterIP") == "None"
    }
    loaded = 0
    for each in of_kind(manifests, "ConfigMap"):
        for name, text in each["data"].items():
            if not name.endswith(".yaml"):
                continue
            (tmp_path / name).write_text(text)
            config = load_config(tmp_path / name, Flags())
            for tier in config.tiers:
                for place in tier.endpoint_addresses:
                    assert (place.is_dns and place.address in services) or place.address == "127.0.0.1:8001"
            loaded += 1
    assert loaded >= 2


def test_grace_periods_exceed_the_drains() -> None:
    by_name = {each["metadata"]["name"]: pod(each) for each in workloads(BUILDS["base"])}
    (config,) = [each for each in of_kind(BUILDS["base"], "ConfigMap") if each["metadata"]["name"] == "causeway-config"]
    drain_s = yaml.safe_load(config["data"]["gateway.yaml"])["server"]["drain_s"]
    (gateway,) = by_name["gateway"]["containers"]
    pause_s = float(gateway["lifecycle"]["preStop"]["exec"]["command"][1])
    assert by_name["gateway"]["terminationGracePeriodSeconds"] > drain_s + pause_s
    (drain,) = [a for a in by_name["triton"]["containers"][0]["args"] if a.startswith("--drain-s=")]
    assert by_name["triton"]["terminationGracePeriodSeconds"] > float(drain.partition("=")[2])
    assert by_name["worker"]["terminationGracePeriodSeconds"] > JobsConfig().drain_s


def test_redis_is_durable() -> None:
    (redis,) = of_kind(BUILDS["base"], "StatefulSet")
    (container,) = pod(redis)["containers"]
    args = container["args"]
    settings = dict(zip(args[::2], args[1::2], strict=True))
    assert (settings["--appendonly"], settings["--appendfsync"]) == ("yes", "always")
    assert settings["--maxmemory-policy"] == "noeviction"
    assert "--requirepass" in settings
    assert settings["--dir"] in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_triton_has_a_gpu_and_real_probes() -> None:
    for name, manifests in (("triton", BUILDS["base"]), ("vllm", BUILDS["vllm"])):
        (found,) = [each for each in workloads(manifests) if each["metadata"]["name"] == name]
        containers = pod(found)["containers"]
        assert any(each["resources"]["limits"].get("nvidia.com/gpu", 0) >= 1 for each in containers)
        assert any(each["image"].startswith("causeway/gateway:") and each["args"][0] == "serve" for each in containers)
        ready = [each["readinessProbe"]["exec"]["command"] for each in containers if "readinessProbe" in each]
        assert ready == [["python3", "-m", "causeway_server.cloud_pool.cli.readiness_probe"]]


@pytest.mark.parametrize("path", sorted(ROOT.glob("*/deploy/*.Dockerfile")), ids=lambda path: path.stem)
def test_dockerfiles_copy_existing_files_and_do_not_run_as_root(path: Path) -> None:
    lines = path.read_text().replace("\\\n", " ").splitlines()
    for line in lines:
        words = line.split()
        if words[:1] == ["COPY"] and not words[1].startswith("--from"):
            assert [word for word in words[1:-1] if not word.startswith("dist/") and not (ROOT / word).exists()] == []
    assert "USER 10001:10001" in lines
    program = {"cloud_pool": "causeway-cloud", "fleet": "causeway-fleet", "edge_node": "causeway-edge"}
    assert lines[-2] == f'ENTRYPOINT ["{program[path.parents[1].name]}"]'


def test_the_engines_version_matches_the_project() -> None:
    (version,) = re.findall(r"llama-cpp-python==[\d.]+", (ROOT / "pyproject.toml").read_text())
    for name in ("cloud_pool/deploy/triton.Dockerfile", "edge_node/deploy/edge-l4t.Dockerfile"):
        assert version in (ROOT / name).read_text()
