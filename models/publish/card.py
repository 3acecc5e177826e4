"""The model card in Markdown: purpose, facts, measured figures, training data, limits."""

from __future__ import annotations

from collections.abc import Sequence

from ..catalog.artifact import Manifest
from ..evaluate.report import EvaluationReport

_USES = {
    "assistant": (
        "The device's model. It turns an everyday command (music, lights, alarms, lists, calendar, weather, volume, "
        "date and time, restaurants, films, books) into one function call as compact JSON. It answers every other "
        'request with the token `<|refuse|>`, followed by `{"name":"out_of_scope","arguments":{}}`. The router derives '
        "the handoff decision from the probability of that token at the first position."
    ),
    "assistant-large": (
        "The cloud's model. It covers the whole catalogue (home, assistant, travel, work, money, banking) as function "
        "calls in compact JSON; a request that matches no function is answered with `out_of_scope`."
    ),
}


def card(manifest: Manifest, reports: Sequence[EvaluationReport]) -> str:
    """Return the Markdown of `README.md` beside the weights."""
    lines = [f"# {manifest.name}", "", _USES.get(manifest.name, manifest.note), ""]
    lines += ["| | |", "|---|---|"]
    facts = {
        "architecture": manifest.architecture
        + (f", {manifest.parameters:,} parameters" if manifest.parameters else ""),
        "weights": f"{manifest.quantisation}, {manifest.size_bytes:,} bytes",
        "context": f"{manifest.context_length} tokens; trained on up to 250" if manifest.context_length else "",
        "defaults": _defaults(manifest),
        "licence": manifest.licence,
        "made by": f"`{manifest.command}`" if manifest.command else "",
        "note": manifest.note,
    }
    lines += [f"| {key} | {value} |" for key, value in facts.items() if value]
    if not reports and manifest.metrics:
        lines += ["", "## Measured", "", "On prompts held back from training.", ""]
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
    """Return the defaults for requests that set none of these."""
    defaults = {
        f"temperature {manifest.temperature or 0:g}": manifest.temperature is not None,
        f"at most {manifest.answer_tokens} tokens": manifest.answer_tokens > 0,
        "answers constrained to the call grammar of each message": manifest.answers == "calls",
    }
    return ", ".join(text for text, applies in defaults.items() if applies)


_LIMITS = (
    "- English only. Arguments are copied from the message, not normalised (`six am` stays `six am`).",
    "- Not a general chat model: it knows no facts and follows no instructions outside its catalogue.",
    "- It reads the last exchange and the last user message only; system messages are skipped.",
)


def _table(reports: Sequence[EvaluationReport]) -> list[str]:
    lines = [
        "| rows of | grammar | rows | intent | exact match | valid JSON | refused |",
        "|---|---|---|---|---|---|---|",
    ]
    for report in reports:
        for result in report.results:
            values = (result.intent, result.exact, result.valid, result.refused)
            shares = " | ".join(f"{100 * share:.1f} %" for share in values)
            lines.append(f"| {result.group} | {'on' if report.grammar else 'off'} | {result.rows} | {shares} |")
    aurocs = [report.refusal_auroc for report in reports if report.refusal_auroc is not None]
    if aurocs:
        lines += ["", f"Refusal token, out-of-domain against in-domain requests: AUROC {aurocs[0]:.3f}."]
    return lines
