"""What a new bundle changes on the boxes of a cohort, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from router.bundle.manifest import Blob, BundleManifest, BundleModel, BundleProjector

from .wording import counted


def manifest_changes(old: BundleManifest | None, new: BundleManifest) -> list[str]:
    """Compare two bundles of a cohort, apart from the policy's text. Empty: they are the same.

    Args:
        old: The bundle that was signed last; None: the cohort is new.
        new: The bundle that the folder gives.
    """
    if old is None:
        sizes = (("case file", new.cases), ("model", new.models), ("setting", new.settings))
        return [f"first bundle: policy, {', '.join(counted(len(of), kind) for kind, of in sizes)}"]
    return [
        *(["policy changed"] if old.policy != new.policy else []),
        *(
            [f"cases changed: {counted(len(old.cases), 'file')}, now {len(new.cases)}"]
            if old.cases != new.cases
            else []
        ),
        *_models(old, new),
        *_settings(old, new),
        *([f"leaving: {old.leaving} -> {new.leaving}"] if old.leaving != new.leaving else []),
        *([f"min_daemon: {old.min_daemon} -> {new.min_daemon}"] if old.min_daemon != new.min_daemon else []),
    ]


def _models(old: BundleManifest, new: BundleManifest) -> Iterator[str]:
    before, after = ({model.name: model for model in one.models} for one in (old, new))
    for name in sorted({*before, *after}):
        if name not in after:
            yield f"model {name}: removed"
        elif name not in before:
            yield f"model {name}: added, {_size(after[name].blob)}"
        elif before[name].blob != after[name].blob:
            yield f"model {name}: other weights, {_size(before[name].blob)} -> {_size(after[name].blob)}"
        elif before[name].golden != after[name].golden:
            yield f"model {name}: other golden prompts"
    yield from _adapters(before, after)
    yield from _projectors(before, after)
    yield from _signals(before, after)


def _adapters(old: Mapping[str, BundleModel], new: Mapping[str, BundleModel]) -> Iterator[str]:
    before, after = (
        {f"{model.name}+{one.name}": one for model in models.values() for one in model.adapters}
        for models in (old, new)
    )
    for name in sorted({*before, *after}):
        if name not in after:
            yield f"adapter {name}: removed"
        elif name not in before:
            yield f"adapter {name}: added, {_size(after[name].blob)}"
        elif before[name].blob != after[name].blob:
            yield f"adapter {name}: other weights, {_size(before[name].blob)} -> {_size(after[name].blob)}"
        elif before[name].scale != after[name].scale:
            yield f"adapter {name}: scale {before[name].scale:g} -> {after[name].scale:g}"
        elif before[name] != after[name]:
            yield f"adapter {name}: other golden prompts"


def _projectors(old: Mapping[str, BundleModel], new: Mapping[str, BundleModel]) -> Iterator[str]:
    for name in sorted({*old, *new}):
        before, after = (models[name].projector if name in models else None for models in (old, new))
        if before == after:
            continue
        if after is None:
            yield f"projector of {name}: removed"
        elif before is None:
            yield f"projector of {name}: added, {_total(after)}"
        elif before.blobs != after.blobs:
            yield f"projector of {name}: other weights, {_total(before)} -> {_total(after)}"
        elif before.tokens != after.tokens:
            yield f"projector of {name}: {before.tokens} -> {after.tokens} tokens"
        else:
            yield f"projector of {name}: for other weights of the model"


def _signals(old: Mapping[str, BundleModel], new: Mapping[str, BundleModel]) -> Iterator[str]:
    before, after = (
        {f"{one.kind} of {model.name}": one for model in models.values() for one in model.signals}
        for models in (old, new)
    )
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            yield f"signal {name}: {'removed' if name not in after else 'changed' if name in before else 'added'}"


def _total(projector: BundleProjector) -> str:
    return f"{sum(blob.size_bytes for blob in projector.blobs) / 1e6:.1f} MB"


def _size(blob: Blob) -> str:
    return f"{blob.size_bytes / 1e6:.1f} MB"


def _settings(old: BundleManifest, new: BundleManifest) -> Iterator[str]:
    for key in sorted({*old.settings, *new.settings}):
        before, after = old.settings.get(key), new.settings.get(key)
        if before != after:
            yield f"settings.{key}: {'unset' if before is None else before} -> {'unset' if after is None else after}"
