"""`fleet.yaml`: the cohorts of a fleet, and what the boxes of each one run. The structs are the file's grammar."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from router.bundle.manifest import AdapterName, Leaving, Name, Release, Sha256, SignalKind
from router.bundle.settings import SettingValue
from router.documents.reader import KeyLocations, read_struct
from router.documents.strict_yaml import Problem

from .rollout_keys import RolloutDoc

FLEET_FILE = "fleet.yaml"

Label = Annotated[
    str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$", title="a label of 1 to 63 letters, digits or . / _ -")
]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the file. Unknown keys are refused."""


class GoldenDoc(_Part, frozen=True):
    """A prompt that a model must answer with exactly this text on the box."""

    prompt: str
    answer: str  # exactly, at temperature 0
    picture: str | None = None  # path of a picture that stands after the prompt, for a model with a projector


class WeightsFile(_Part, frozen=True):
    """Weights by their file in this folder, or, for a file that was uploaded before, by its hash and size."""

    file: str | None = None
    sha256: Annotated[Sha256, Meta(title="a sha256 in hex")] | None = None
    size_bytes: Annotated[int, Meta(ge=1)] | None = None


class _WeightsDoc(WeightsFile, frozen=True):
    golden: tuple[GoldenDoc, ...] = ()  # tried on the box before they serve


class AdapterDoc(_WeightsDoc, frozen=True):
    """A LoRA adapter of a model, a GGUF. Requests ask for MODEL+ADAPTER."""

    scale: float = 1.0  # how strongly it is applied


class ProjectorDoc(WeightsFile, frozen=True):
    """The mmproj file of a vision model, or with `encoder` a projector in ONNX."""

    model_sha256: Annotated[Sha256, Meta(title="a sha256 in hex")] | None = None  # the weights it was made for
    encoder: WeightsFile | None = None  # the picture encoder whose features it reads, in ONNX
    tokens: Annotated[int, Meta(ge=1, le=4096)] | None = None  # that a picture becomes; with `encoder`


class SignalDoc(WeightsFile, frozen=True):
    """A learned signal about the model's answers, the file that `causeway-models` wrote."""

    model_sha256: Annotated[Sha256, Meta(title="a sha256 in hex")] | None = None  # the weights it was fitted on


class ModelDoc(_WeightsDoc, frozen=True):
    """A model, its adapters, its projector and the signals about its answers."""

    adapters: dict[Annotated[AdapterName, Meta(title="a name of a-z, 0-9, '.', '_', '-'")], AdapterDoc] = {}
    projector: ProjectorDoc | None = None  # with it the model takes pictures, under `fusion: early` and `hybrid`
    signals: dict[SignalKind, SignalDoc] = {}  # for these weights; those on the device are for others
    uncalibrated: bool = False  # without signals on purpose: a handoff compares the engine's raw score

    @property
    def files(self) -> dict[str, WeightsFile]:
        """The model and everything that is loaded with it, by key below the model's."""
        found: dict[str, WeightsFile] = {"": self}
        found |= {f".adapters.{name}": one for name, one in self.adapters.items()}
        if self.projector is not None:
            found[".projector"] = self.projector
            if self.projector.encoder is not None:
                found[".projector.encoder"] = self.projector.encoder
        return found | {f".signals.{kind}": one for kind, one in self.signals.items()}

    @property
    def pictures(self) -> dict[str, str]:
        """The paths of the golden prompts' pictures, by key below the model's."""
        asked = {"": self.golden} | {f".adapters.{name}": one.golden for name, one in self.adapters.items()}
        return {
            f"{key}.golden[{index}].picture": one.picture
            for key, prompts in asked.items()
            for index, one in enumerate(prompts)
            if one.picture is not None
        }


class CohortDoc(_Part, frozen=True):
    """The boxes whose labels match, and what they run."""

    policy: str  # path of the policy, relative to fleet.yaml
    match: dict[Label, Label] = {}  # a box needs all of these labels; empty: every box
    signals: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None  # that its boxes can read
    models: dict[Name, ModelDoc] = {}
    settings: dict[str, SettingValue] = {}  # by dotted key of edge.yaml
    min_daemon: Annotated[Release, Meta(title="a release such as 1.2.3")] = "0.0.0"
    leaving: Leaving = "refuse"  # of a box whose own decisions would leave the device under the new policy
    rollout: RolloutDoc = RolloutDoc()

    @property
    def adapters(self) -> dict[str, tuple[str, ...]]:
        """The names of the adapters of each model."""
        return {model: tuple(doc.adapters) for model, doc in self.models.items()}


class FleetDoc(_Part, frozen=True):
    """The content of `fleet.yaml`."""

    version: Literal[1]
    name: Annotated[Name, Meta(title="a name of 1 to 64 letters, digits or . _ -")]
    cohorts: Annotated[dict[Name, CohortDoc], Meta(min_length=1)]  # a box belongs to the first one that matches


def read_fleet(text: str, file: str) -> tuple[FleetDoc | None, KeyLocations, tuple[Problem, ...]]:
    """Parse and check `fleet.yaml` by itself, without the files that it names.

    Args:
        text: The document.
        file: Its path, for messages.

    Returns:
        The fleet, or None if a problem is an error; the location of each key; the problems.
    """
    return read_struct(text, file, FleetDoc)


def cohort_of(fleet: FleetDoc, labels: dict[str, str]) -> str | None:
    """Return the name of the first cohort that matches a box's labels, or None."""
    for name, cohort in fleet.cohorts.items():
        if cohort.match.items() <= labels.items():
            return name
    return None
