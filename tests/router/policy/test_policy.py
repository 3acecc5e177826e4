"""Policy files: what is accepted, and the message and location of each mistake."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.router.errors import PolicyError
from causeway_server.router.policy.compiled import check_policy, parse_policy
from causeway_server.router.prices import FREE, Price
from causeway_server.router.types import AUTO, ExactCache, Handoff
from tests.router.sample_requests import KIOSK, kiosk

HEAD = "version: 1\nname: p\n"
TARGETS = "targets:\n  small: {at: edge, model: a}\n  large: {at: cloud, model: b}\n"
ROUTES = "routes:\n  - name: r\n    use: [large, small]\n"
GOOD = HEAD + TARGETS + ROUTES


def edit(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


def routes(*rules: str) -> str:
    return HEAD + TARGETS + "routes:\n" + "".join(f"  - {rule}\n" for rule in rules)


MISTAKES = {
    # what the file says → where the error points (line, column, key) and what it says
    "no YAML": (GOOD + "x: [", (9, 5, ""), "the file ends within a `[` or `{` that is not closed"),
    "tab": (GOOD + "limits:\n\tqueue: 1", (10, 1, ""), "a tab: indent with spaces"),
    "a key out of line": (
        edit("    use: [", "   use: ["),
        (8, 4, ""),
        "the indentation does not fit: a key in column 4, but those above are in column 5 (line 7) or 1 (line 6)",
    ),
    "a key in the column of its list item": (
        edit("    use: [", "  use: ["),
        (8, 3, ""),
        "a key in column 3, but those above",
    ),
    "a key at the top level instead of its route": (
        GOOD + "handoff: {after_tokens: 8, below: 0.5}\n",
        (9, 1, "handoff"),
        "unknown key here: it belongs in `routes[]`; check the indentation",
    ),
    "a key that is indented too deep": (
        edit("    use: [", "      use: ["),
        (8, 10, ""),
        "indented deeper than line 7, which already has a value",
    ),
    "a list item out of line": (
        GOOD + " - name: q\n   use: [small]\n",
        (9, 2, ""),
        "a list item in column 2, but those above are in column 3 (line 7)",
    ),
    "entries that are not indented": (
        edit("  small: {at: edge, model: a}\n  large", "small: {at: edge, model: a}\nlarge"),
        (3, 9, "targets"),
        "is empty: indent its entries below it",
    ),
    "a key without its colon": (edit("routes:", "routes"), (6, 1, ""), "a key without a colon: write `key: value`"),
    "a colon without a space": (edit("- name: r", "- name:r"), (8, 8, ""), "line 7 has no space after its colon"),
    "a bracket that is not closed": (edit("model: a}", "model: a"), (5, 8, ""), "the `{` of line 4 is not closed"),
    "a quote that is not closed": (edit("name: r", "name: 'r"), (9, 1, ""), "the quote of line 7 is not closed"),
    "a condition that starts with a quoted text": (
        edit("    use: [", '    when: "a" in request.tags\n    use: ['),
        (8, 15, ""),
        "put the whole value in quotes",
    ),
    "a condition with a colon and a space": (
        edit("    use: [", "    when: request.stream ? true : false\n    use: ["),
        (8, 33, ""),
        "a value that contains `: ` needs quotes",
    ),
    "a condition that starts with !": (
        edit("    use: [", "    when: !has(device.battery)\n    use: ["),
        (8, 11, ""),
        "put a value that starts with ! in quotes",
    ),
    "a condition that starts with &&": (
        edit("    use: [", "    when: && request.stream\n    use: ["),
        (8, 11, ""),
        "a value cannot start with &: put the whole value in quotes",
    ),
    "empty": ("", (1, 1, ""), "the file is empty"),
    "two documents": (GOOD + "---\na: 1\n", (9, 1, ""), "not valid YAML"),
    "a list": ("- a\n", (1, 1, ""), "must be a mapping"),
    "an anchor": (edit("small: {at", "small: &a {at"), (4, 10, ""), "anchors are not allowed"),
    "an alias": (edit("large: {at: cloud, model: b}", "large: *a"), (5, 10, ""), "aliases are not allowed"),
    "a tag": (edit("version: 1", "version: !!int 1"), (1, 10, ""), "tags are not allowed"),
    "a merge key": (edit("large: {at", "large: {<<: {}, at"), (5, 11, "targets.large"), "merge keys"),
    "a key twice": (edit("name: p", "name: p\nname: q"), (3, 1, "name"), "twice"),
    "a nested key twice": (edit("model: a", "model: a, model: b"), (4, 31, "targets.small.model"), "twice"),
    "a key that is a list": (GOOD + "[a]: 1\n", (9, 1, ""), "a key must be text"),
    "unknown key": (GOOD + "route: []\n", (9, 1, "route"), "unknown key, did you mean `routes`?"),
    "unknown key below": (
        edit("model: b", "model: b, time_out: 4s"),
        (5, 32, "targets.large.time_out"),
        "did you mean `timeout`?",
    ),
    "unknown key without a neighbour": (GOOD + "zzz: 1\n", (9, 1, "zzz"), "known here: version, name, targets"),
    "version missing": (
        GOOD.removeprefix("version: 1\n"),
        (1, 1, ""),
        "the key `version` is missing: write `version: 1`",
    ),
    "other version": (edit("version: 1", "version: 2"), (1, 10, "version"), "write `version: 1`"),
    "no routes": (HEAD + TARGETS, (1, 1, ""), "the key `routes` is missing"),
    "empty routes": (HEAD + TARGETS + "routes: []\n", (6, 9, "routes"), "needs at least 1 entry"),
    "null routes": (HEAD + TARGETS + "routes:\n", (6, 8, "routes"), "is empty"),
    "no place of a target": (
        edit("small: {at: edge, ", "small: {"),
        (4, 10, "targets.small"),
        "the key `at` is missing: it needs edge, cloud, cloud:NAME",
    ),
    "no targets": (HEAD + "targets: {}\n" + ROUTES, (3, 10, "targets"), "needs at least 1 entry"),
    "a name that is a number": (edit("name: p", "name: 5"), (2, 7, "name"), "put it in quotes"),
    "a name that is a bool": (edit("name: p", "name: off"), (2, 7, "name"), "read as true or false"),
    "a name with spaces": (edit("name: p", "name: a b"), (2, 7, "name"), "`a b` is not a name"),
    "a long name": (edit("name: p", "name: " + "x" * 65), (2, 7, "name"), "is not a name"),
    "a reserved target": (edit("small: {at", f"{AUTO}: {{at"), (4, 3, "targets.auto"), "let the policy choose"),
    "an unknown location": (
        edit("at: edge", "at: egde"),
        (4, 15, "targets.small.at"),
        "`egde` is not edge, cloud, cloud:NAME",
    ),
    "a cloud without a name": (edit("at: cloud", '"at": "cloud:"'), (5, 17, "targets.large.at"), "is not edge, cloud"),
    "a list with the device": (
        edit("at: cloud", "at: [edge]"),
        (5, 16, "targets.large.at[0]"),
        "a cloud, as cloud:NAME",
    ),
    "a list of no cloud": (edit("at: cloud", "at: []"), (5, 15, "targets.large.at"), "needs at least 1 entry"),
    "a cloud twice": (
        edit("at: cloud", "at: [cloud:eu, cloud:eu]"),
        (5, 11, "targets.large.at"),
        "lists a cloud twice",
    ),
    "a cloud with a signal's name": (edit("at: cloud", "at: cloud:tier"), (5, 11, "targets.large.at"), "is reserved"),
    "an unknown ability": (
        edit("model: a", "model: a, can: [chat, tool]"),
        (4, 43, "targets.small.can[1]"),
        "did you mean `tools`?",
    ),
    "a duration without unit": (
        edit("model: b", "model: b, timeout: 4"),
        (5, 41, "targets.large.timeout"),
        "`4` is not a duration such as 250ms",
    ),
    "a sexagesimal duration": (
        edit("model: b", "model: b, timeout: 1:30"),
        (5, 41, "targets.large.timeout"),
        "`1:30` is not a duration",
    ),
    "no time at all": (
        edit("model: b", "model: b, timeout: 0s"),
        (5, 32, "targets.large.timeout"),
        "must be more than 0",
    ),
    "a first token later than the end": (
        edit("model: b", "model: b, timeout: 4s, first_token_timeout: 5s"),
        (5, 45, "targets.large.first_token_timeout"),
        "is longer than `timeout`",
    ),
    "a price that is text": (
        edit("model: b", "model: b, price: {input: cheap}"),
        (5, 47, "targets.large.price.input"),
        "`cheap` is not a number",
    ),
    "a price per thousand tokens": (
        edit("model: b", "model: b, usd_per_1k_tokens: 1"),
        (5, 32, "targets.large.usd_per_1k_tokens"),
        "`usd_per_1k_tokens` is now `price`. Prices are now per million tokens: a price of 0.07 becomes `price: {input",
    ),
    "a model without its prices": (
        edit("model: b", "model: b, price: {of: openai/gpt-4o-mini}"),
        (5, 32, "targets.large.price"),
        "run `causeway-models prices FILE`, which writes them here, or write `input` and `output`",
    ),
    "a negative price": (
        edit("model: b", "model: b, price: {input: -1}"),
        (5, 47, "targets.large.price.input"),
        "-1 is less than 0",
    ),
    "an infinite price": (
        edit("model: b", "model: b, price: {input: .inf}"),
        (5, 47, "targets.large.price.input"),
        "`.inf` is not a number",
    ),
    "a shadow of more than all answers": (
        GOOD + "shadow: {share: 1.5}\n",
        (9, 17, "shadow.share"),
        "1.5 is more than 1",
    ),
    "a shadow without another side": (
        edit("use: [large, small]", "use: [small]") + "shadow: {share: 0.01}\n",
        (9, 1, "shadow"),
        "none can be compared",
    ),
    "a shadow that no request may have": (
        GOOD + "constraints: [{name: here, keep: on_device}]\nshadow: {share: 0.01}\n",
        (10, 1, "shadow"),
        "`here` binds every request to the device or to regions",
    ),
    "an unknown target in use": (
        edit("use: [large, small]", "use: [large, smal]"),
        (8, 18, "routes[0].use[1]"),
        "unknown target `smal`, did you mean `small`?",
    ),
    "a target twice in use": (
        edit("use: [large, small]", "use: [large, large]"),
        (8, 18, "routes[0].use[1]"),
        "already in this list",
    ),
    "an empty use": (edit("use: [large, small]", "use: []"), (8, 10, "routes[0].use"), "needs at least 1 entry"),
    "use that is no list": (edit("use: [large, small]", "use: large"), (8, 10, "routes[0].use"), "must be a list"),
    "a route name twice": (
        routes("{name: r, when: request.stream, use: [small]}", "{name: r, use: [small]}"),
        (8, 6, "routes[1].name"),
        "the name `r` is used",
    ),
    "a route behind one that always holds": (
        routes("{name: a, use: [small]}", "{name: b, use: [large]}"),
        (8, 5, "routes[1]"),
        "is never reached: `a` before it always holds",
    ),
    "a route behind a constant true": (
        routes("{name: a, when: 'true', use: [small]}", "{name: b, use: [large]}"),
        (8, 5, "routes[1]"),
        "is never reached",
    ),
    "a route that never holds": (
        routes("{name: a, when: '1 > 2', use: [small]}", "{name: b, use: [large]}"),
        (7, 15, "routes[0].when"),
        "is always false",
    ),
    "a constraint that never binds": (
        GOOD + "constraints: [{name: c, when: 'false', keep: on_device}]\n",
        (9, 25, "constraints[0].when"),
        "the constraint never binds",
    ),
    "a constraint that keeps nothing known": (
        GOOD + "constraints: [{name: c, keep: on_site}]\n",
        (9, 31, "constraints[0].keep"),
        "not one of in_region, on_device, parts_on_device",
    ),
    "a handoff without a later target": (
        routes("{name: a, use: [large, small], handoff: {after_tokens: 8, below: 0.5}}"),
        (7, 36, "routes[0].handoff"),
        "no target can take over from `small`",
    ),
    "a handoff without the device": (
        routes("{name: a, use: [large], handoff: {after_tokens: 8, below: 0.5}}"),
        (7, 29, "routes[0].handoff"),
        "only an edge target reports its confidence",
    ),
    "a handoff after nothing": (
        routes("{name: a, use: [small, large], handoff: {after_tokens: 0, below: 0.5}}"),
        (7, 60, "routes[0].handoff.after_tokens"),
        "0 is less than 1",
    ),
    "a fusion that no target can take": (
        routes("{name: a, use: [large], fusion: early}"),
        (7, 29, "routes[0].fusion"),
        "only a model on the device takes soft tokens",
    ),
    "a handoff at more than all": (
        routes("{name: a, use: [small, large], handoff: {after_tokens: 8, below: 1.5}}"),
        (7, 70, "routes[0].handoff.below"),
        "1.5 is more than 1",
    ),
    "a condition that is a bool of YAML": (
        edit("use: [large, small]", "use: [small]\n    when: true"),
        (9, 11, "routes[0].when"),
        "put it in quotes",
    ),
    "a condition that is no CEL": (
        edit("use: [large, small]", "use: [small]\n    when: request.n >"),
        (9, 22, "routes[0].when"),
        "not valid CEL",
    ),
    "a misspelt signal": (
        edit("use: [large, small]", "use: [small]\n    when: request.stream || device.temprature_c > 85"),
        (9, 29, "routes[0].when"),
        "unknown signal `device.temprature_c`, did you mean `device.temperature_c`?",
    ),
    "a misspelt signal in quotes": (
        edit("use: [large, small]", "use: [small]\n    when: 'device.temprature_c > 85'"),
        (9, 12, "routes[0].when"),
        "did you mean `device.temperature_c`?",
    ),
    "a misspelt signal in a block": (
        edit("use: [large, small]", "use: [small]\n    when: >\n      device.temprature_c > 85"),
        (9, 11, "routes[0].when"),
        "did you mean `device.temperature_c`?",
    ),
    "a condition that is a number": (
        edit("use: [large, small]", "use: [small]\n    when: request.prompt_tokens + 1"),
        (9, 11, "routes[0].when"),
        "is a number, not true or false",
    ),
    "a condition that mixes types": (
        edit("use: [large, small]", 'use: [small]\n    when: request.prompt_tokens > "x"'),
        (9, 11, "routes[0].when"),
        "mixes types: request.prompt_tokens is an int",
    ),
    "a condition that is too long": (
        edit("use: [large, small]", f"use: [small]\n    when: {' || '.join(['request.stream'] * 200)}"),
        (9, 11, "routes[0].when"),
        "longer than 2000 characters",
    ),
    "a cache rule with a signal that does not exist": (
        GOOD + "cache: [{when: request.temprature == 0, exact: {ttl: 30s}}]\n",
        (9, 16, "cache[0].when"),
        "did you mean `request.temperature`?",
    ),
    "a cache rule without a ttl": (
        GOOD + "cache: [{exact: {stale_if_error: 1m}}]\n",
        (9, 17, "cache[0].exact"),
        "the key `ttl` is missing",
    ),
    "a cache for no time": (
        GOOD + "cache: [{exact: {ttl: 0s}}]\n",
        (9, 18, "cache[0].exact.ttl"),
        "must be more than 0",
    ),
    "a semantic cache without an exact one": (
        GOOD + "cache: [{semantic: {ttl: 1s}}]\n",
        (9, 10, "cache[0].semantic"),
        "needs `exact` in the same rule",
    ),
    "a semantic cache for no time": (
        GOOD + "cache: [{exact: {ttl: 1s}, semantic: {ttl: 0s}}]\n",
        (9, 39, "cache[0].semantic.ttl"),
        "leave `semantic` out",
    ),
    "a semantic cache for longer than answers are kept": (
        GOOD + "cache: [{exact: {ttl: 1s}, semantic: {ttl: 2s}}]\n",
        (9, 39, "cache[0].semantic.ttl"),
        "longer than `exact.ttl`",
    ),
    "a semantic cache that promises nothing": (
        GOOD + "cache: [{exact: {ttl: 1s}, semantic: {ttl: 1s, max_error: 0.5}}]\n",
        (9, 59, "cache[0].semantic.max_error"),
        "0.05",
    ),
    "a cache rule that is never reached": (
        GOOD + "cache: [{exact: {ttl: 1s}}, {exact: {ttl: 2s}}]\n",
        (9, 29, "cache[1]"),
        "is never reached: `cache[0]`",
    ),
    "a limit of nothing": (GOOD + "limits: {concurrent: 0}\n", (9, 22, "limits.concurrent"), "0 is less than 1"),
    "a limit that is a fraction": (
        GOOD + "limits: {queue: 1.5}\n",
        (9, 17, "limits.queue"),
        "`1.5` is not a whole number",
    ),
    "an octal limit": (GOOD + "limits: {queue: 010}\n", (9, 17, "limits.queue"), "is not a whole number"),
    "a rate of nothing": (
        GOOD + "limits: {per_client_rps: 0}\n",
        (9, 26, "limits.per_client_rps"),
        "0 is not more than 0",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_refused_with_file_line_column_and_key(mistake: str) -> None:
    text, (line, column, key), words = MISTAKES[mistake]
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, "p.yaml")
    error = caught.value
    where = f"p.yaml:{line}:{column}"
    assert error.where == (f"{where}: {key}" if key else where)
    assert words in error.message
    assert error.message.startswith(error.where)


def test_the_policy_without_the_mistakes_is_accepted() -> None:
    policy, problems = check_policy(GOOD, "p.yaml")
    assert policy is not None
    assert problems == ()


def test_every_mistake_of_a_file_is_reported_in_its_order() -> None:
    """The raised error names the first and counts the rest."""
    text = GOOD.replace("at: edge", "at: egde").replace("name: p", "name: 5") + "zzz: 1\n"
    policy, problems = check_policy(text, "p.yaml")
    assert policy is None
    assert [problem.location.path for problem in problems] == ["name", "targets.small.at", "zzz"]
    with pytest.raises(PolicyError, match=r"\(and 2 more\)"):
        parse_policy(text, "p.yaml")


def test_a_file_that_is_too_large_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(PolicyError, match="larger than 256 KiB"):
        parse_policy(GOOD + "#" * (256 * 1024))
    with pytest.raises(PolicyError, match="larger than 256 KiB"):
        parse_policy(GOOD + "#" + "é" * (128 * 1024))


@pytest.mark.parametrize("deep", ["[" * 5000, "{a: " * 5000, "- " * 5000, "[" * 17 + "]" * 17])
def test_deep_nesting_is_refused_without_exhausting_the_stack(deep: str) -> None:
    with pytest.raises(PolicyError):
        parse_policy("version: " + deep, "p.yaml")


@pytest.mark.parametrize(
    "text", ["\x00", '"\\U00110000"', "%YAML " + "9" * 5000 + ".1\n--- a", '"\\ud800"', "a: 'x\x07'"]
)
def test_odd_bytes_are_refused(text: str) -> None:
    with pytest.raises(PolicyError):
        parse_policy(text, "p.yaml")


def test_the_example_policy_is_read_completely() -> None:
    policy = kiosk()
    assert policy.name == "retail-kiosk"
    assert [(t.name, t.at, t.timeout_s, t.price) for t in policy.targets] == [
        ("small", "edge", None, FREE),
        ("large", "cloud", 4.0, Price(70, 70)),
        ("medium", "cloud", None, FREE),
    ]
    assert [c.name for c in policy.constraints] == ["private-stays"]
    assert [r.name for r in policy.routes] == ["hot-device", "fast-path", "otherwise"]
    assert policy.routes[1].handoff == Handoff(after_tokens=8, below=0.55)
    assert policy.cache[0].exact == ExactCache(ttl_s=30.0, stale_if_error_s=600.0)
    assert (policy.limits.concurrent, policy.limits.queue, policy.limits.per_client_rps) == (16, 64, 20.0)


def test_only_the_signals_that_are_named_are_needed() -> None:
    """Per phase, so that the cache does not wait for a token count."""
    policy = kiosk()
    assert policy.constraint_needs.signals == {"request.tags"}
    assert policy.cache_needs.signals == {"request.tags", "request.temperature"}
    assert policy.route_needs.signals == {
        "request.tags",
        "request.prompt_tokens",
        "device.temperature_c",
        "device.memory_free_mb",
    }
    assert policy.needs == policy.route_needs.signals | policy.cache_needs.signals


def test_the_revision_depends_on_content_not_on_layout() -> None:
    plain = parse_policy(GOOD).revision
    assert len(plain) == 12
    assert parse_policy("# a comment\n" + GOOD.replace("name: p", 'name: "p"')).revision == plain
    assert parse_policy(GOOD.replace("{at: edge, model: a}", "{model: a, at: edge}")).revision == plain
    assert parse_policy(GOOD.replace("name: p", "name: q")).revision != plain
    assert parse_policy(GOOD.replace("use: [large, small]", "use: [small, large]")).revision != plain


def test_a_policy_cannot_be_changed() -> None:
    policy = kiosk()
    with pytest.raises(AttributeError):
        policy.name = "other"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        policy.routes[0].name = "other"  # type: ignore[misc]


WARNINGS = {
    "an unused target": (edit("use: [large, small]", "use: [large]"), "targets.small", "no route uses this target"),
    "no route that always holds": (
        edit("use: [large, small]", "use: [large, small]\n    when: request.stream"),
        "routes",
        "every route has a `when`",
    ),
    "a constraint that empties a route": (
        routes("{name: a, when: request.stream, use: [large]}", "{name: b, use: [small]}")
        + "constraints: [{name: c, when: request.stream, keep: on_device}]\n",
        "routes[0].use",
        "a request bound by `c` fails here",
    ),
    "a shadow whose cost is not known": (
        GOOD + "shadow: {share: 0.01}\n",
        "shadow",
        "`usd_per_day` bounds nothing where `large` answers",
    ),
    "a price on the device": (
        edit("model: a", "model: a, price: {input: 1000, output: 1000}"),
        "targets.small.price",
        "has no price",
    ),
    "spend without a price": (
        routes("{name: a, when: spend.usd_today > 1, use: [small]}", "{name: b, use: [large]}"),
        "routes[0].when",
        "spend.* stays 0",
    ),
    "a rule that needs what clients may leave out": (
        routes("{name: a, when: request.max_tokens > 800, use: [small]}", "{name: b, use: [large]}"),
        "routes[0].when",
        "request.max_tokens is absent (the client sets no limit); write `!has(request.max_tokens) || …` if it should",
    ),
    "a rule that needs a sensor in both of its sides": (
        routes(
            "{name: a, when: device.battery < 0.2 || request.stream && device.battery < 0.5, use: [small]}",
            "{name: b, use: [large]}",
        ),
        "routes[0].when",
        "device.battery is absent (the device has no battery)",
    ),
    "a negated rule that needs a sensor": (
        routes("{name: a, when: '!(device.throttled || request.stream)', use: [small]}", "{name: b, use: [large]}"),
        "routes[0].when",
        "device.throttled is absent (the state of the clock is not readable)",
    ),
    "a signal of the cloud without a cloud target": (
        routes("{name: a, when: cloud.reachable, use: [small]}", "{name: b, use: [small]}").replace(
            "  large: {at: cloud, model: b}\n", ""
        ),
        "routes[0].when",
        "cloud.reachable is absent (no target is `at: cloud`)",
    ),
    "a model that is named like a target": (
        edit("model: a", "model: large"),
        "targets.small.model",
        "is also the name of another target",
    ),
}


@pytest.mark.parametrize("warning", WARNINGS)
def test_each_warning_leaves_the_policy_usable(warning: str) -> None:
    text, key, words = WARNINGS[warning]
    policy, problems = check_policy(text, "p.yaml")
    assert policy is not None
    assert [(p.severity, p.location.path) for p in problems] == [("warning", key)]
    assert words in problems[0].message


@pytest.mark.parametrize(
    "when",
    [
        "request.stream || device.battery < 0.2",  # one side is enough
        "has(device.battery) && device.battery < 0.2",  # the absence is considered
        "!has(device.battery) || device.battery < 0.2",
        "!(request.stream && device.throttled)",
        "request.prompt_tokens < 48",  # absent only while something is broken
    ],
)
def test_a_rule_that_considers_absence_or_needs_usual_signals_gets_no_warning(when: str) -> None:
    text = routes(f"{{name: a, when: '{when}', use: [small]}}", "{name: b, use: [large]}")
    assert check_policy(text, "p.yaml")[1] == ()


def test_a_constraint_gets_no_warning_for_an_absent_signal() -> None:
    """It applies then: constraints fail closed."""
    text = GOOD + "constraints: [{name: c, when: device.battery < 0.2, keep: on_device}]\n"
    assert check_policy(text, "p.yaml")[1] == ()


KEYS = ("version", "name", "targets", "routes", "cache", "limits", "constraints", "use", "when", "exact", "handoff")
WORDS = (
    "at",
    "edge",
    "small",
    "1",
    "on_device",
    "keep",
    "ttl",
    "30s",
    "request.stream",
    "true",
    "null",
    "~",
    "<<",
    "-",
)
words = st.sampled_from(KEYS + WORDS)
trees = st.recursive(
    words | st.text(max_size=8) | st.integers() | st.floats() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=6),
    max_leaves=24,
)


@pytest.mark.slow
@given(trees)
def test_any_tree_is_a_policy_or_a_policy_error(tree: object) -> None:
    accepted_or_refused(yaml.safe_dump(tree, allow_unicode=True))


@given(st.text(max_size=200) | st.text(alphabet="{}[]&*!|>-:,?#%@'\"\\ \n\tab1.", max_size=60))
def test_any_text_is_a_policy_or_a_policy_error(text: str) -> None:
    accepted_or_refused(text)


@pytest.mark.slow
@given(st.integers(0, len(KIOSK) - 1), st.integers(0, 12), st.text(alphabet="{}[]&*!|>-:,'\"\\ \nab1.", max_size=4))
def test_a_damaged_policy_is_accepted_or_refused(start: int, length: int, patch: str) -> None:
    accepted_or_refused(KIOSK[:start] + patch + KIOSK[start + length :])


def accepted_or_refused(text: str) -> None:
    policy, problems = check_policy(text, "p.yaml")
    if policy is not None:
        return
    assert any(problem.severity == "error" for problem in problems)
    with pytest.raises(PolicyError, match=r"^p\.yaml"):
        parse_policy(text, "p.yaml")
