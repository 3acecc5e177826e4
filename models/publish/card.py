"""The model card in Markdown, generated from a manifest: purpose, facts, measured figures, training data, limits."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from ..catalog.artifact import Manifest

_PURPOSES = {
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
_LIMITS = (
    "- English only. Arguments are copied from the message, not normalised (`six am` stays `six am`).",
    "- Not a general chat model: it knows no facts and follows no instructions outside its catalogue.",
    "- It reads the last exchange and the last user message only; system messages are skipped.",
)
_MEASURES = ("intent", "exact", "valid", "refused")


def card(manifest: Manifest, appendix: Sequence[str] = ()) -> str:
    """Return the Markdown of `README.md` beside the weights.

    Args:
        appendix: lines of Markdown at the end.
    """
    purpose = _PURPOSES.get(manifest.name, manifest.note)
    data = [f"- {one.name} ({one.licence}): {one.attribution}" for one in manifest.data]
    sections = [
        [f"# {manifest.name}"],
        [textwrap.fill(purpose, 120, break_long_words=False, break_on_hyphens=False)] if purpose else [],
        ["| | |", "|---|---|", *_facts(manifest)],
        _measured(manifest),
        ["## Trained on", "", *data] if data else [],
        ["## Limits", "", *_LIMITS] if manifest.format == "gguf" else [],
        list(appendix),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _facts(manifest: Manifest) -> Iterator[str]:
    parameters = f", {manifest.parameters:,} parameters" if manifest.parameters else ""
    facts = {
        "architecture": manifest.architecture + parameters,
        "weights": f"{manifest.quantisation}, {manifest.size_bytes:,} bytes",
        "context": f"{manifest.context_length} tokens; trained on up to 250" if manifest.context_length else "",
        "defaults": _defaults(manifest),
        "licence": manifest.licence,
        "made by": f"`{manifest.command}`" if manifest.command else "",
        "note": manifest.note if manifest.name in _PURPOSES else "",
    }
    return (f"| {key} | {value} |" for key, value in facts.items() if value)


def _defaults(manifest: Manifest) -> str:
    """Return the defaults for requests that set none of these."""
    defaults = {
        f"temperature {manifest.temperature or 0:g}": manifest.temperature is not None,
        f"at most {manifest.answer_tokens} tokens": manifest.answer_tokens > 0,
        "answers constrained to the call grammar of each message": manifest.answers == "calls",
        "transcripts of speech in lower case, without punctuation": manifest.transcripts == "spoken",
    }
    return ", ".join(text for text, applies in defaults.items() if applies)


def _measured(manifest: Manifest) -> list[str]:
    metrics = manifest.metrics
    if not metrics:
        return []
    groups = [key.removesuffix("/exact") for key in metrics if key.endswith("/exact")]
    if not groups:
        figures = [f"- {key}: {value:g}" for key, value in metrics.items()]
        return ["## Measured", "", "On prompts held back from training.", "", *figures]
    lines = [
        "## Measured",
        "",
        "Greedy answers through llama.cpp on rows held back from training (`--held-back`).",
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
        lines += ["", f"Refusal token, out-of-domain against in-domain requests: AUROC {auroc:.3f}."]
    return lines
