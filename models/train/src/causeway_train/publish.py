"""Publishing of the assistants: weights, manifest, and card with the measured figures."""

from __future__ import annotations

from pathlib import Path

import msgspec

from causeway_server.models.catalog.artifact import Artifact, DataSource, Manifest, save_manifest, sha256_of
from causeway_server.models.constraints.grammars import ANSWER_TOKENS
from causeway_server.models.publish.publish import PublishGate, publish_gguf

from .evaluate.report import EvaluationReport
from .function_calls.catalog import CATALOG
from .publish_signal import LICENCE, card

ATTRIBUTIONS = (
    DataSource("HWU64", "CC BY 4.0", "Liu et al. 2019, xliuhw/NLU-Evaluation-Data"),
    DataSource("SNIPS 2017", "CC0 1.0", "Coucke et al. 2018, sonos/nlu-benchmark"),
    DataSource("CLINC150", "CC BY 3.0", "Larson et al. 2019, clinc/oos-eval"),
    DataSource("BANKING77", "CC BY 4.0", "Casanueva et al. 2020, PolyAI-LDN/task-specific-datasets"),
    DataSource("MMLU questions", "MIT", "Hendrycks et al. 2021; used only as questions that the model must refuse"),
    DataSource("GSM8K questions", "MIT", "Cobbe et al. 2021; used only as questions that the model must refuse"),
)
_PURPOSES = {
    "assistant": (
        "This model runs on the device. It turns an everyday command (music, lights, alarms, lists, calendar, weather, "
        "volume, date and time, restaurants, films, books) into one function call as compact JSON. It answers every "
        'other request with the token `<|refuse|>`, followed by `{"name":"out_of_scope","arguments":{}}`. The router '
        "derives the handoff decision from the probability of that token at the first position."
    ),
    "assistant-large": (
        "This model runs in the cloud. It answers with a function call in compact JSON and knows the whole catalogue "
        "of functions (home, assistant, travel, work, money, banking). If a request matches no function, the call is "
        "`out_of_scope`."
    ),
}
_LIMITS = (
    "- The model understands only English.",
    "- It copies arguments from the message and does not normalise them (`six am` stays `six am`).",
    "- It is not a general chat model: it knows no facts, and follows no instructions outside its catalogue.",
    "- It reads only the last exchange and the last message of the user, and skips system messages.",
)
_MEASURES = ("intent", "exact", "valid", "refused")


def publish_assistant(
    weights: Path,
    name: str,
    root: Path,
    *,
    report: Path | None,
    command: str,
    seed: int | None,
    note: str,
    teachers: tuple[DataSource, ...] = (),
    gate: PublishGate | None = None,
) -> Artifact:
    """Publish one of the assistants trained here.

    Args:
        report: the output of `evaluate --format json`; its figures go into the manifest and the card.
        teachers: pretrained models to attribute beside the training data.
        gate: the comparison that the weights must pass.
    """
    reports = msgspec.json.decode(report.read_bytes(), type=list[EvaluationReport]) if report else []
    reports = [one for one in reports if one.model == name] or reports
    metrics = {key: value for one in reports for key, value in one.metrics("grammar/" if one.grammar else "").items()}
    artifact = publish_gguf(
        weights, name, root, command=command, licence=LICENCE, note=note, answers="calls", gate=gate
    )
    manifest = msgspec.structs.replace(
        artifact.manifest,
        data=(*ATTRIBUTIONS, *teachers),
        metrics=metrics | artifact.manifest.metrics,
        seed=seed,
        catalog_sha256=sha256_of(CATALOG),
        # A call is either correct or not: default to the likeliest one. No call is longer than ANSWER_TOKENS.
        temperature=0.0,
        answer_tokens=ANSWER_TOKENS,
        transcripts="spoken",
    )
    artifact = save_manifest(manifest, artifact.folder)
    (artifact.folder / "README.md").write_text(assistant_card(artifact.manifest), encoding="utf-8")
    return artifact


def assistant_card(manifest: Manifest) -> str:
    """Return the Markdown of an assistant's `README.md`."""
    purpose = _PURPOSES.get(manifest.name)
    facts = {
        "context": f"{manifest.context_length} tokens; training used up to 250",
        "defaults": _defaults(manifest),
        "note": manifest.note if purpose else "",
    }
    return card(manifest, purpose or manifest.note, _measured(manifest), ["## Limits", "", *_LIMITS], facts)


def _defaults(manifest: Manifest) -> str:
    """Return the defaults for requests that do not set these parameters."""
    defaults = {
        f"temperature {manifest.temperature or 0:g}": manifest.temperature is not None,
        f"at most {manifest.answer_tokens} tokens": manifest.answer_tokens > 0,
        "answers are constrained to the call grammar of each message": manifest.answers == "calls",
        "transcripts of speech get lower case and no punctuation": manifest.transcripts == "spoken",
    }
    return "; ".join(text for text, applies in defaults.items() if applies)


def _measured(manifest: Manifest) -> list[str]:
    metrics = manifest.metrics
    groups = [key.removesuffix("/exact") for key in metrics if key.endswith("/exact")]
    if not groups:
        return []
    lines = [
        "## Measured",
        "",
        "llama.cpp generated greedy answers to rows that were held back from training (`--held-back`).",
        "",
        "| rows of | grammar | rows | intent | exact match | valid JSON | refused |",
        "|---|---|---|---|---|---|---|",
    ]
    for group in groups:
        rows = metrics[f"{group}/rows"]
        # Back to counts: the manifest's shares are rounded to four digits.
        counts = (round(metrics[f"{group}/{measure}"] * rows) for measure in _MEASURES)
        shares = " | ".join(f"{100 * count / rows:.1f} %" for count in counts)
        grammar = "on" if group.startswith("grammar/") else "off"
        name = group.removeprefix("grammar/")
        lines.append(f"| {name} | {grammar} | {rows:g} | {shares} |")
    if "refusal_auroc" in metrics:
        auroc = metrics["refusal_auroc"]
        lines += [
            "",
            f"The refusal token's probability separates out-of-domain from in-domain requests with AUROC {auroc:.3f}.",
        ]
    return lines
