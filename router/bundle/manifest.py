"""The manifest of a bundle, and the plan by which every device of a cohort finds its bundle, without a list of devices.

A manifest is canonical JSON, and the sha256 of those bytes (hex) is the bundle's id. Canonical: msgspec's compact JSON
with the fields in the order of the structs, map keys sorted, and every field present, except the adapters, the
projector, the signals and the images that a model does not have, and `leaving` where it is the default. Exactly one
sequence of bytes encodes a manifest, so equal bundles have equal ids on every machine. A bundle with signals or with
`leaving` has the format 2, any other one the format 1, which older daemons read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..described import described
from ..renames import GOLDEN_IMAGE, RENAMED
from .refusals import BundleAltered, BundleInvalid, DaemonTooOld
from .settings import SettingValue, check_setting

MAX_MANIFEST_BYTES = 1024 * 1024
_FORMATS = (1, 2)

Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
AdapterName = Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9._-]{0,63}$")]
Release = Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,5})(\.(0|[1-9][0-9]{0,5})){2}$")]


SignalKind = Literal["confidence", "edge.quality", "pair"]
Leaving = Literal["refuse", "report"]


class _Canonical(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Blob(_Canonical, frozen=True):
    """A file, identified by its content: it is stored, fetched and shared between bundles under its hash."""

    sha256: Sha256
    size_bytes: Annotated[int, Meta(ge=0, le=1 << 42)]


class GoldenPrompt(_Canonical, frozen=True, omit_defaults=True):
    """A prompt and the model's exact answer at temperature 0, for a trial of the model on the device. `image`: an
    image after the prompt, as soft tokens of the model's projector.
    """

    prompt: str
    answer: str
    image: Blob | None = None


class BundleAdapter(_Canonical, frozen=True):
    """A LoRA adapter of a model; requests name it as MODEL+NAME."""

    name: AdapterName
    blob: Blob
    scale: float
    golden: tuple[GoldenPrompt, ...]


class BundleProjector(_Canonical, frozen=True, omit_defaults=True):
    """A vision model's `mmproj` file, which turns images into soft tokens. `model_sha256`: the weights that it was made
    for, which must be those of its model.
    """

    blob: Blob
    model_sha256: Sha256


class BundleSignal(_Canonical, frozen=True):
    """A learned signal about a model's answers, which replaces the device's own for these weights. `kind`:
    `edge.quality` from the prompt, `confidence` of the first tokens, or `pair`: both, against a larger model.
    """

    kind: SignalKind
    blob: Blob
    model_sha256: Sha256  # the weights that it was fitted on, which must be those of its model


class BundleModel(_Canonical, frozen=True, omit_defaults=True):
    name: Name
    blob: Blob
    golden: tuple[GoldenPrompt, ...]
    adapters: tuple[BundleAdapter, ...] = ()
    projector: BundleProjector | None = None
    signals: tuple[BundleSignal, ...] = ()

    @property
    def loaded(self) -> tuple[Blob, ...]:
        """The files that are loaded: the weights, those of the adapters, the projector."""
        projector = () if self.projector is None else (self.projector.blob,)
        return (self.blob, *(adapter.blob for adapter in self.adapters), *projector)

    @property
    def images(self) -> tuple[Blob, ...]:
        """The images of golden prompts, each once."""
        prompts = (*self.golden, *(one for adapter in self.adapters for one in adapter.golden))
        return tuple(dict.fromkeys(one.image for one in prompts if one.image is not None))


@described
class BundleManifest(_Canonical, frozen=True, omit_defaults=True):
    """Everything that a device of one cohort runs; its parts change only together. `leaving`: the device's action if
    some of its recorded decisions, replayed under this policy, would leave the device.
    """

    format: Literal[1, 2]
    cohort: Name
    serial: Annotated[int, Meta(ge=1, le=1 << 53)]  # grows by one with each bundle of the cohort
    created: Annotated[int, Meta(ge=0, le=1 << 53)]  # Unix seconds
    policy: Blob
    cases: tuple[Blob, ...]
    models: tuple[BundleModel, ...]
    settings: dict[str, SettingValue]  # values by dotted key of edge.yaml; only keys of `settings.SETTINGS`
    min_daemon: Release  # oldest daemon that understands this bundle
    leaving: Leaving = "refuse"

    @property
    def adapters(self) -> dict[str, tuple[str, ...]]:
        """The names of the adapters of each model."""
        return {model.name: tuple(adapter.name for adapter in model.adapters) for model in self.models}

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """Every file of the bundle, each once: the policy, its cases, and the models with their files."""
        models = [blob for model in self.models for blob in (*model.loaded, *model.images)]
        models += [signal.blob for model in self.models for signal in model.signals]
        return tuple(dict.fromkeys((self.policy, *self.cases, *models)))


@described
class _Header(msgspec.Struct, frozen=True):
    """The fields of a manifest by which an older daemon recognises a bundle that it cannot read."""

    format: int
    min_daemon: Release


def format_of(manifest: BundleManifest) -> Literal[1, 2]:
    """Return the oldest format that can express this manifest."""
    return 2 if manifest.leaving != "refuse" or any(model.signals for model in manifest.models) else 1


def blob_of(content: bytes) -> Blob:
    return Blob(hashlib.sha256(content).hexdigest(), len(content))


def encode_canonical(document: BundleManifest | RolloutPlan) -> bytes:
    return msgspec.json.encode(document, order="deterministic")


def bundle_id(manifest: BundleManifest) -> str:
    """Return the sha256 of the canonical bytes, in hex."""
    return hashlib.sha256(encode_canonical(manifest)).hexdigest()


def read_manifest(
    content: bytes, expected_id: str, daemon_version: str, *, is_installed: bool = False
) -> BundleManifest:
    """Read and check a manifest on a device.

    Args:
        expected_id: The id of the requested bundle, else BundleAltered is raised.
        daemon_version: Such as ``1.2.3`` or ``1.3.0.dev2``; DaemonTooOld: the bundle, or its format, needs a newer one.
        is_installed: Also read names of the previous version, in a bundle that this device accepted at that time.
    Raises:
        BundleInvalid: Malformed, not canonical, or sets a key that a fleet may not set; names the key.
    """
    found = hashlib.sha256(content).hexdigest()
    if found != expected_id:
        raise BundleAltered(f"Bundle {expected_id}: the content was altered, because its sha256 is {found}.")
    if len(content) > MAX_MANIFEST_BYTES:
        raise BundleInvalid(f"Bundle {expected_id} is larger than {MAX_MANIFEST_BYTES} bytes.")
    try:
        _check_version(msgspec.json.decode(content, type=_Header), expected_id, daemon_version)
        manifest = decode_installed(content) if is_installed else msgspec.json.decode(content, type=BundleManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = "; it is now `image`" if f"field `{GOLDEN_IMAGE}`" in str(error) else ""
        raise BundleInvalid(f"Bundle {expected_id}: {error}{hint}.") from error
    check_manifest(manifest)
    if not is_installed and encode_canonical(manifest) != content:
        raise BundleInvalid(f"Bundle {expected_id}: the JSON is not in canonical form.")
    return manifest


def decode_installed(content: bytes) -> BundleManifest:
    """Return a manifest of this or the previous version, with the present names. Raises msgspec.DecodeError."""
    manifest = _decode_images(content)
    settings = dict(manifest.settings)
    for one in RENAMED["edge.yaml"]:
        if one.old in settings:
            value = settings.pop(one.old)
            if one.new:
                settings[one.new] = one.values.get(str(value), value)
    return manifest if settings == manifest.settings else msgspec.structs.replace(manifest, settings=settings)


def decode_signed(content: bytes) -> BundleManifest:
    """Return a manifest that a control plane of this version or the previous one signed. Golden prompts with images of
    the previous one are left out: it then differs from every present manifest, so that the cohort gets a new bundle.
    Raises msgspec.DecodeError.
    """
    manifest = _decode_images(content)
    if encode_canonical(manifest) == content:
        return manifest
    models = tuple(msgspec.structs.replace(model, golden=()) for model in manifest.models)
    return msgspec.structs.replace(manifest, models=models)


def _decode_images(content: bytes) -> BundleManifest:
    # Quotes inside of a JSON text are escaped: only a key can have this form.
    return msgspec.json.decode(content.replace(f'"{GOLDEN_IMAGE}":'.encode(), b'"image":'), type=BundleManifest)


def check_manifest(manifest: BundleManifest) -> None:
    """Check what the types cannot express: each model, adapter and signal once, adapters that have an effect,
    projectors and signals of these weights, settings that a fleet may set, within their bounds, and the format.
    BundleInvalid names the model, the adapter or the key.
    """
    adapters = [(f"{model.name}+{adapter.name}", adapter) for model in manifest.models for adapter in model.adapters]
    _check_once("model", [model.name for model in manifest.models])
    _check_once("adapter", [name for name, _ in adapters])
    for name, adapter in adapters:
        if not is_scale(adapter.scale):
            raise BundleInvalid(
                f"The adapter {name} has the scale {adapter.scale:g}, which is not a finite number other than 0."
            )
    for model in manifest.models:
        _check_projector(model)
        _check_signals(model)
    if manifest.format != format_of(manifest):
        raise BundleInvalid(f"`format` must be {format_of(manifest)} for this content, not {manifest.format}.")
    for key, value in manifest.settings.items():
        try:
            checked = check_setting(key, value)
        except ValueError as error:
            raise BundleInvalid(f"`settings.{key}`: {error}.") from error
        if type(checked) is not type(value):  # 30 where 30.0 is canonical
            raise BundleInvalid(f"`settings.{key}` must be written as {checked!r}, not {value!r}.")


def is_scale(value: float) -> bool:
    """Return whether a number can be an adapter's scale: finite and not 0."""
    return math.isfinite(value) and value != 0.0


def daemon_is_new_enough(daemon_version: str, min_daemon: str) -> bool:
    """Compare versions by PEP 440: ``1.3.0.dev2`` is older than ``1.3.0``; an unreadable version is too old."""
    from packaging.version import InvalidVersion, Version  # on demand: most processes read no bundle

    try:
        return Version(daemon_version) >= Version(min_daemon)
    except InvalidVersion:
        return False


def _check_once(kind: str, names: Sequence[str]) -> None:
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise BundleInvalid(f"The bundle has the {kind} {doubled[0]} twice.")


def _check_projector(model: BundleModel) -> None:
    projector = model.projector
    if projector is None:
        if model.images:
            raise BundleInvalid(f"{model.name}: a golden prompt has an image, but the model has no projector.")
        return
    _check_weights(model, "projector was made for", projector.model_sha256)


def _check_signals(model: BundleModel) -> None:
    _check_once("signal", [f"{signal.kind} of {model.name}" for signal in model.signals])
    for signal in model.signals:
        _check_weights(model, f"signal {signal.kind} was fitted on", signal.model_sha256)


def _check_weights(model: BundleModel, what: str, sha256: str) -> None:
    if sha256 != model.blob.sha256:
        ours = model.blob.sha256[:12]
        raise BundleInvalid(
            f"{model.name}: its {what} the weights {sha256[:12]}, but the weights in the bundle are {ours}."
        )


def _check_version(header: _Header, expected_id: str, daemon_version: str) -> None:
    if header.format not in _FORMATS or not daemon_is_new_enough(daemon_version, header.min_daemon):
        raise DaemonTooOld(
            f"Bundle {expected_id} (format {header.format}) needs a daemon {header.min_daemon} or newer, "
            f"but this is {daemon_version}. Update the daemon first."
        )


WHOLE = 100_000
"""The share that includes every device; 1,000 is one percent."""
MAX_PLAN_BYTES = 1024 * 1024

Device = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""A device's id; also the `sub` of its tokens, which has at most 64 characters."""
Salt = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]


@described
class RolloutPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Moves the devices of a cohort from one bundle to the next. Signed by the role `rollout`."""

    cohort: Name
    rollout: Name
    # previous bundle; None for the cohort's first bundle, when devices outside the share keep their bundles
    from_bundle: Sha256 | None
    to_bundle: Sha256
    salt: Salt
    share: Annotated[int, Meta(ge=0, le=WHOLE)]
    pins: dict[Device, Sha256]  # bundles of devices that are pinned to one
    holds: frozenset[Device]  # devices that keep their present bundle

    @property
    def bundles(self) -> frozenset[str]:
        """The id of every bundle that the plan names."""
        named = {self.to_bundle, *self.pins.values()}
        return frozenset(named if self.from_bundle is None else {*named, self.from_bundle})


def position(salt: str, device: str) -> int:
    """Return a device's position in the order of a rollout, from 0 to `WHOLE` - 1: a hash of the salt and its id. A
    larger share thus includes the devices of a smaller one, new devices have a place, and another salt gives another
    order.
    """
    return int.from_bytes(hashlib.sha256(f"{salt}:{device}".encode()).digest(), "big") % WHOLE


def in_share(plan: RolloutPlan, device: str) -> bool:
    """Return whether the hash alone puts this device among those that get the new bundle."""
    return position(plan.salt, device) < plan.share


def assigned_bundle(plan: RolloutPlan, device: str, running: str | None) -> str | None:
    """Return the id of the bundle that a device should run, now `running` (None: the factory's files).

    1. A pin names the bundle of this device.
    2. A held device keeps its present bundle.
    3. A device in the share gets the new bundle.
    4. The other devices get the old bundle, which undoes the rollout when the share shrinks; without an old bundle,
       they keep their present one.
    """
    if device in plan.pins:
        return plan.pins[device]  # (1)
    if device in plan.holds:
        return running  # (2)
    if in_share(plan, device):
        return plan.to_bundle  # (3)
    return running if plan.from_bundle is None else plan.from_bundle  # (4)


def read_plan(content: bytes, cohort: str) -> RolloutPlan:
    """Read the plan of a cohort. Raises BundleInvalid: malformed, too large, or the plan of another cohort."""
    if len(content) > MAX_PLAN_BYTES:
        raise BundleInvalid(f"The rollout plan of {cohort} is larger than {MAX_PLAN_BYTES} bytes.")
    try:
        plan = msgspec.json.decode(content, type=RolloutPlan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BundleInvalid(f"The rollout plan of {cohort} cannot be read: {error}.") from error
    if plan.cohort != cohort:
        raise BundleInvalid(f"The rollout plan of {cohort} is the plan of another cohort, {plan.cohort}.")
    return plan


def binomial_tail(trials: int, found: int, probability: float) -> float:
    """Return the probability of at least `found` successes; 1 if `found` is at most the expected number."""
    if found <= trials * probability:
        return 1.0
    log_term = log_choose(trials, found) + found * math.log(probability) + (trials - found) * math.log1p(-probability)
    tail, ratio, odds = 0.0, 1.0, probability / (1 - probability)
    for count in range(found, trials + 1):
        tail += ratio
        ratio *= (trials - count) / (count + 1) * odds
        if ratio < 1e-16 * tail:
            break
    return min(1.0, math.exp(log_term) * tail)


def log_choose(whole: int, part: int) -> float:
    """Return the logarithm of the number of ways to choose `part` of `whole`."""
    return math.lgamma(whole + 1) - math.lgamma(part + 1) - math.lgamma(whole - part + 1)
