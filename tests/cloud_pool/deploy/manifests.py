"""The Kubernetes manifests as tests read them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "cloud_pool" / "deploy" / "kubernetes"
FLEET = ROOT / "fleet" / "deploy" / "kubernetes"
Manifest = dict[str, Any]


class _Strict(yaml.SafeLoader):
    """Duplicate keys are errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"twice: {twice}", node.start_mark)
        return super().construct_mapping(node, deep)


def read(path: Path) -> list[Manifest]:
    return [document for document in yaml.load_all(path.read_text(), Loader=_Strict) if document]


def build(folder: Path) -> list[Manifest]:
    """Return what `kubectl kustomize` builds, as far as we use it: resources, images, patches that delete or append."""
    (kustomization,) = read(folder / "kustomization.yaml")
    found: list[Manifest] = []
    for name in kustomization["resources"]:
        path = (folder / name).resolve()
        found += build(path) if path.is_dir() else read(path)
    for entry in kustomization.get("patches", ()):
        patch = yaml.safe_load(entry["patch"])
        if isinstance(patch, list):
            _append(found, entry["target"], patch)
            continue
        assert patch.pop("$patch") == "delete"
        left = [each for each in found if identity(each) != identity(patch)]
        assert len(left) == len(found) - 1, f"{identity(patch)} is not there"
        found = left
    tags = {image["name"]: f"{image['newName']}:{image['newTag']}" for image in kustomization.get("images", ())}
    for each in workloads(found):
        for container in containers(each):
            container["image"] = tags.get(container["image"], container["image"])
    return found


def _append(manifests: list[Manifest], target: Manifest, operations: list[Manifest]) -> None:
    """Apply the operations of a JSON patch, each of which appends to a list."""
    chosen = [
        each
        for each in of_kind(manifests, target["kind"])
        if re.fullmatch(target["name"], str(each["metadata"]["name"]))
    ]
    assert chosen
    for each in chosen:
        for operation in operations:
            *keys, last = operation["path"].strip("/").split("/")
            assert (operation["op"], last) == ("add", "-")
            found: Any = each
            for key in keys:
                found = found[int(key) if key.isdigit() else key]
            found.append(operation["value"])


def identity(manifest: Manifest) -> tuple[str, str, str, str]:
    metadata = manifest["metadata"]
    return manifest["apiVersion"], manifest["kind"], metadata.get("namespace", ""), metadata["name"]


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [each for each in manifests if each["kind"] in kinds]


def workloads(manifests: list[Manifest]) -> list[Manifest]:
    return of_kind(manifests, "Deployment", "StatefulSet")


def pod(workload: Manifest) -> Manifest:
    return workload["spec"]["template"]["spec"]


def containers(workload: Manifest) -> list[Manifest]:
    """Return the containers of a workload's pod, those first that prepare it."""
    return [*pod(workload).get("initContainers", ()), *pod(workload)["containers"]]


def labels(workload: Manifest) -> dict[str, str]:
    return workload["spec"]["template"]["metadata"]["labels"]


def selects(selector: Manifest, found: dict[str, str]) -> bool:
    """Match a LabelSelector, or a Service's plain map."""
    if not {"matchLabels", "matchExpressions"} & set(selector):
        return selector.items() <= found.items()
    if not selector.get("matchLabels", {}).items() <= found.items():
        return False
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] == "In"
        if found.get(each["key"]) not in each["values"]:
            return False
    return True


def named_ports(workload: Manifest) -> dict[str, int]:
    return {
        port["name"]: port["containerPort"] for each in pod(workload)["containers"] for port in each.get("ports", ())
    }


def metric_names(manifests: list[Manifest]) -> Iterator[str]:
    """Return the metric names that the autoscalers use."""
    for scaler in of_kind(manifests, "HorizontalPodAutoscaler"):
        for metric in scaler["spec"]["metrics"]:
            for kind in ("pods", "external", "object"):
                if kind in metric:
                    yield metric[kind]["metric"]["name"]
