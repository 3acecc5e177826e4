"""The model card: what a model is for, what it was made from, and its measured figures, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from ..catalog.artifact import Manifest
from ..evaluate.report import EvaluationReport

_USES = {
    "assistant": (
        "The device's model. It turns a command as people say it (music, lights, alarms, lists, calendar, weather, "
        "volume, date and time, restaurants, films, books) into one function call as compact JSON. To anything else it "
        'answers the token `<|refuse|>`, then `{"name":"out_of_scope","arguments":{}}`. The probability of that token '
        "at the first position is what the router hands off on."
    ),
    "assistant-large": (
        "The cloud's model. It covers the whole catalogue (home, assistant, travel, work, money, banking) as function "
        "calls in compact JSON; what belongs to no function is `out_of_scope`."
    ),
}


def card(manifest: Manifest, reports: Sequence[EvaluationReport]) -> str:
    """Markdown for `README.md` beside the weights."""
    lines = [f"# {manifest.name}", "", _USES.get(manifest.name, manifest.note), ""]
    lines += ["| | |", "|---|---|"]
    facts = {
        "architecture": manifest.architecture
        + (f", {manifest.parameters:,} parameters" if manifest.parameters else ""),
        "weights": f"{manifest.quantisation}, {manifest.size_bytes:,} bytes",
        "context": f"{manifest.context_length} tokens; trained on up to 250" if manifest.context_length else "",
        "by default": _defaults(manifest),
        "licence": manifest.licence,
        "made by": f"`{manifest.command}`" if manifest.command else "",
        "note": manifest.note,
    }
    lines += [f"| {key} | {value} |" for key, value in facts.items() if value]
    if not reports and manifest.metrics:
        lines += ["", "## Measured", "", "On held-back prompts.", ""]
        lines += [f"- {key}: {value:g}" for key, value in manifest.metrics.items()]
    if reports:
        lines += [
            "",
            "## Measured",
            "",
            "Greedy answers through llama.cpp on rows held back from training (`--held-back`).",
            "",
        ]
        lines += _table(reports)
    if manifest.data:
        lines += ["", "## Trained on", ""]
        lines += [f"- {source.name} ({source.licence}): {source.attribution}" for source in manifest.data]
    if manifest.format == "gguf":
        lines += ["", "## Limits", "", *_LIMITS]
    return "\n".join(lines) + "\n"


def _defaults(manifest: Manifest) -> str:
    """What holds where the caller says nothing."""
    said = {
        f"temperature {manifest.temperature or 0:g}": manifest.temperature is not None,
        f"at most {manifest.answer_tokens} tokens": manifest.answer_tokens > 0,
        "held to the grammar of each utterance": manifest.answers == "calls",
    }
    return ", ".join(text for text, holds in said.items() if holds)


_LIMITS = (
    "- English only; arguments are copied from the utterance, not normalised (`six am` stays `six am`).",
    "- It is no general chat model: it knows no facts and follows no instructions beyond its catalogue.",
    "- Only the last exchange and the last user message are read; system messages are skipped.",
)


def _table(reports: Sequence[EvaluationReport]) -> list[str]:
    lines = [
        "| rows of | grammar | rows | intent | exact match | valid JSON | refused |",
        "|---|---|---|---|---|---|---|",
    ]
    for report in reports:
        for one in report.results:
            shares = " | ".join(f"{100 * share:.1f} %" for share in (one.intent, one.exact, one.valid, one.refused))
            lines.append(f"| {one.group} | {'on' if report.grammar else 'off'} | {one.rows} | {shares} |")
    told = [report.refusal_auroc for report in reports if report.refusal_auroc is not None]
    if told:
        lines += ["", f"Refusal token, own domain against the rest: AUROC {told[0]:.3f}."]
    return lines
