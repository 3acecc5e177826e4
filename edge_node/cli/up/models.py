"""The models that `up` starts, and the demo questions that fit them, with the table of their results.

The models are those that the policy names, or a pair for which the policy is written. There is a question for each way
in which a request can be answered: `TOUR` is for the assistants that ship, which answer with function calls,
`KNOWLEDGE` for general models.
"""

from __future__ import annotations

from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table
from rich.text import Text

from causeway_sdk import AsyncCauseway, CausewayAPIError, CausewayError, Decision, RequestOptions
from causeway_server.models.catalog.artifact import Artifact, ArtifactError, ArtifactNotFound, find_artifact
from causeway_server.router.errors import PolicyError
from causeway_server.router.policy.compiled import Policy, parse_policy

from ...config.schema import Config
from ...signals.estimators import load_calibrator, load_pair
from ...storage.policies import DEFAULT_POLICY

if TYPE_CHECKING:
    from causeway_server.models.signals.pair import PairHandoff

DEFAULT_SMALL, DEFAULT_LARGE = "assistant", "assistant-large"
_RAW = (
    "A model without a calibrator is judged by its raw confidence, which is a poor measure of whether "
    "its facts are right."
)
_CALIBRATED = "The confidence is calibrated for this pair: the probability that the large model is not better."
_HINT = (
    "The device's model turns commands into function calls. Two models that chat: `causeway-models pull demo:smol` "
    "(590 MB), then `causeway-edge up --small smollm2-135m --large qwen-05b`, or `make run MODELS=smol` for both."
)
_RAW_HANDOFF = "after_tokens: 8, below: 0.55"
_LARGE_PARAMETERS = 100_000_000
_FIXED_COLUMNS = ("route", "target", "reason", "first ms", "total ms")  # never truncated
_GAP = 2
_ANSWER_WIDTH = 36  # columns that question and answer need together; otherwise no answers are shown
_ROUTE_STYLES = {"edge": "green", "cloud": "blue", "cache": "yellow"}
_GATEWAY = "# Written by `causeway-edge up`.\ntiers: {tiers}\n"
_LARGE_MODELS = """\
# A CPU reads a long prompt for a large model in many seconds, in which the server is silent:
# with the defaults, which suit a GPU, it would be taken for dead.
load_balancing: {silent_before_probe_s: 10, probe_timeout_s: 60, hung_after_s: 180}
"""


class StartedModels(msgspec.Struct, frozen=True):
    """The models and questions of one run."""

    policy_text: str  # the policy to write for this run; empty: use the configured one
    cloud: tuple[str, ...]  # the cloud's models, served by Triton under their own names
    model_dirs: tuple[str, ...]  # folders searched for models first
    questions: tuple[Question, ...]  # the demo questions that fit the device's model
    gateway_text: str = ""  # the gateway's configuration to write for this run: its tiers; empty: there is no gateway
    note: str = ""  # a remark about the pair's calibration; empty: none
    vllm: Vllm | None = None


class VllmDescription(msgspec.Struct, frozen=True):
    """The command of a real vLLM, as `make run UPSTREAM=vllm` writes it."""

    command: tuple[str, ...]
    environ: dict[str, str]
    model: str


class Vllm(msgspec.Struct, frozen=True):
    """The vLLM of one run, which stands where Triton stands otherwise."""

    description: VllmDescription
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


def read_vllm(path: Path, port: int) -> Vllm:
    """Read the description of a vLLM. Raises ArtifactError."""
    try:
        return Vllm(msgspec.json.decode(path.read_bytes(), type=VllmDescription), port)
    except (OSError, msgspec.DecodeError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}. `make run UPSTREAM=vllm` installs vLLM.") from error


def pair_policy(small: str, large: str, handoff: PairHandoff | None = None) -> str:
    """Return the policy of both models. Without a calibration the handoff compares the device's raw confidence."""
    template = Template(Path(__file__).with_name("pair.yaml").read_text(encoding="utf-8"))
    if handoff is None:
        return template.substitute(small=small, large=large, comment=_RAW, handoff=_RAW_HANDOFF)
    line = f"after_tokens: {handoff.after_tokens}, below: {handoff.below:g}, within: {handoff.within_ms}ms"
    return template.substitute(small=small, large=large, comment=_CALIBRATED, handoff=line)


def choose_models(
    config: Config, small: str | None, large: str | None, *, with_cloud: bool, vllm: Vllm | None = None
) -> StartedModels:
    """Find the models of the policy, or of the pair `small` and `large`, which gets the handoff that it was calibrated
    for; with `vllm` the large model is vLLM's. Raises ArtifactError if a model is not on this machine; PolicyError,
    also if a name cannot be used in a policy; OSError if its file cannot be read.
    """
    large = vllm.description.model if vllm is not None else large
    is_pair = small is not None or large is not None
    small, large = small or DEFAULT_SMALL, large or DEFAULT_LARGE
    text = pair_policy(small, large) if is_pair else ""
    path = Path(config.policy) if config.policy else DEFAULT_POLICY
    policy = parse_policy(text or _read_policy(path), "up" if is_pair else str(path))
    folders = [Path(folder) for folder in config.engine.model_dirs]
    on_device = [target.model for target in policy.targets if target.at == "edge"] if config.engine.enabled else []
    named = [target.model for target in policy.targets if target.at == "cloud"] if with_cloud else []
    in_cloud = named if vllm is None else []  # in Triton
    artifacts = {name: _find(name, folders) for name in dict.fromkeys((*on_device, *in_cloud))}
    speaks = any(artifacts[name].manifest.answers == "text" for name in on_device)
    note = "" if is_pair or speaks or not on_device else _HINT
    if is_pair and on_device:
        handoff, note = _calibration(small, large, policy, folders)
        text = pair_policy(small, large, handoff)
    has_large = any(artifacts[name].manifest.parameters >= _LARGE_PARAMETERS for name in in_cloud)
    return StartedModels(
        policy_text=text,
        cloud=tuple(dict.fromkeys(in_cloud)),
        model_dirs=tuple(str(folder.absolute()) for folder in folders),
        questions=KNOWLEDGE if speaks else TOUR,
        gateway_text=_gateway_text(policy, vllm) + (_LARGE_MODELS if has_large or vllm else "") if named else "",
        note=note,
        vllm=vllm,
    )


def _gateway_text(policy: Policy, vllm: Vllm | None) -> str:
    """Return the gateway's configuration: a tier per cloud model. Models of an `embed` target make embeddings."""
    if vllm is not None:
        # SmolLM2's template has no tools, and the server is started without a parser of calls.
        upstream = {"kind": "openai", "urls": [vllm.url], "without": ["tools"]}
        tier = {"name": vllm.description.model, "upstream": upstream}
        return _GATEWAY.format(tiers=msgspec.json.encode([tier]).decode())
    in_cloud = [target for target in policy.targets if target.at == "cloud"]
    embed = {target.model for target in in_cloud if "embedding" in target.can}
    tiers = [
        {"name": name, "can": ["chat", "completion", *(["embedding"] if name in embed else [])]}
        for name in dict.fromkeys(target.model for target in in_cloud)
    ]
    return _GATEWAY.format(tiers=msgspec.json.encode(tiers).decode())


def _calibration(small: str, large: str, policy: Policy, folders: list[Path]) -> tuple[PairHandoff | None, str]:
    """Return the handoff that this pair was calibrated for, and a remark about it."""
    advice = f"`causeway-models calibrate --small {small} --large {large} --prompts FILE` finds a threshold"
    try:
        handoff = load_pair(small, policy, folders).parameters.handoff
    except ArtifactNotFound:
        try:
            load_calibrator(small, folders)
        except ArtifactError:
            return None, f"{small} and {large} are not calibrated, so a handoff compares raw confidence; {advice}"
        return None, ""  # the device's model has its own calibrator
    except (ArtifactError, ImportError) as error:
        return None, f"the calibration of {small} and {large} is not used: {error}"
    if handoff is None:
        return None, f"the calibration of {small} and {large} has no threshold; {advice}"
    return handoff, f"{small} and {large} are calibrated: {large} takes over below a probability of {handoff.below:g}"


def _read_policy(path: Path) -> str:
    """Read a policy as the daemon does. Raises PolicyError or OSError."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PolicyError("The file is not UTF-8.", where=str(path)) from None


def _find(name: str, folders: list[Path]) -> Artifact:
    try:
        return find_artifact(name, folders)
    except ArtifactError as error:
        advice = f"`causeway-models pull SOURCE --name {name}` or `causeway-models add FILE --name {name}` installs it"
        raise ArtifactError(f"{error}; {advice}") from error


_LONG = (
    "I went to a cash machine near the station yesterday evening to take out some money for the weekend, and after I "
    "had typed in my number it kept my card and gave nothing back, so please tell me how to get it or a new one"
)


class Question(msgspec.Struct, frozen=True):
    """A demo question. `purpose` names the route that it is meant to demonstrate."""

    text: str
    purpose: str
    tags: tuple[str, ...] = ()


TOUR = (
    Question("wake me up at six am", "short and in the device model's domain: answered on the device"),
    Question(_LONG, "long: answered in the cloud"),
    Question(_LONG, "repeated: answered from the cache"),
    Question("why was my card payment declined", "short but outside the device model's domain: handed off"),
    Question("put milk on my shopping list", "private: never leaves the device", ("private",)),
)

_PARAGRAPH = (
    "The Amazon river carries more water than any other river on earth, about a fifth of all the fresh water that "
    "reaches the oceans. It rises in the Andes of Peru, crosses Brazil from west to east, and reaches the Atlantic "
    "after some 6,400 kilometres. During the wet season parts of it are more than 45 kilometres wide, and ocean-going "
    "ships can sail upstream as far as Iquitos. "
    "In one sentence: where does the river rise, and into which ocean does it flow?"
)
_CHOICE = "Which of these is a source of renewable energy? A) coal B) oil C) wind D) natural gas. Answer with a letter."
KNOWLEDGE = (
    Question("What is the capital of France?", "short: answered on the device"),
    Question(_PARAGRAPH, "long: answered in the cloud"),
    Question(_PARAGRAPH, "repeated: answered from the cache"),
    Question("How many legs does a spider have?", "short: small models get it wrong"),
    Question("What is 17 plus 25?", "short arithmetic"),
    Question("Turn off the lights in the kitchen.", "a command, which a general model answers in words"),
    Question(_CHOICE, "multiple choice: handed off, if the pair is calibrated, because small models guess"),
    Question("Name one side effect of ibuprofen.", "private: never leaves the device", ("private",)),
)
"""Questions for models that answer with text."""


class Row(msgspec.Struct, frozen=True):
    """The result of one question. `error` is empty if it was answered."""

    question: Question
    decision: Decision
    answer: str = ""
    total_ms: float = 0.0
    error: str = ""


async def ask(causeway: AsyncCauseway, question: Question) -> Row:
    """Ask a question, streamed to measure the first token, at temperature 0 because sampled answers are not cached."""
    arguments = RequestOptions(temperature=0.0, max_tokens=64, tags=question.tags)
    try:
        async with await causeway.chat(question.text, stream=True, **arguments) as stream:
            answer = await stream.answer()
    except CausewayAPIError as error:
        return Row(question, error.decision or Decision(), error=f"{error.status} {error.code}: {error.message}")
    except CausewayError as error:
        return Row(question, Decision(), error=str(error))
    return Row(question, answer.decision, answer.text, answer.total_ms)


def render_table(rows: list[Row], width: int) -> Table:
    """Lay out the rows for a terminal of `width` columns: texts are truncated to fit; a narrow one shows no answers."""
    cells = [_cells(row) for row in rows]
    fixed = [max(len(heading), *(len(row[at]) for row in cells)) for at, heading in enumerate(_FIXED_COLUMNS, start=1)]
    rest = width - sum(fixed) - _GAP * (len(fixed) + 1)
    question = max(12, min(34, rest // 2 if rest >= _ANSWER_WIDTH else rest))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    table.add_column("question", no_wrap=True, width=question)
    for heading, size in zip(_FIXED_COLUMNS, fixed, strict=True):
        table.add_column(heading, no_wrap=True, width=size, justify="right" if "ms" in heading else "left")
    if rest >= _ANSWER_WIDTH:
        table.add_column("answer", no_wrap=True, width=min(60, rest - question))
    for row in cells:
        table.add_row(*row[: len(table.columns)])
    return table


def _cells(row: Row) -> list[Text]:
    decision = row.decision
    route = decision.route + (" (degraded)" if decision.degraded else "")
    return [
        Text(row.question.text),
        Text(route, style=_ROUTE_STYLES.get(decision.route, "")),
        Text(decision.target),
        Text(decision.reason),
        Text(_milliseconds(decision.first_token_ms)),
        Text(_milliseconds(row.total_ms or None)),
        Text("failed, see below", style="red") if row.error else Text(" ".join(row.answer.split())),
    ]


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
