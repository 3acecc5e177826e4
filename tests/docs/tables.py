"""The reference tables of the pages, each generated from the code that it describes."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

import click
import msgspec
import yaml

import causeway_server.cloud_pool.cli.main
import causeway_server.edge_node.cli.main
import causeway_server.fleet.cli.commands
import causeway_server.models.cli.commands
from causeway_server.cloud_pool.config import Config as GatewayConfig
from causeway_server.edge_node.agent.journal import MEANING as MEANING_OF_STATE
from causeway_server.edge_node.agent.journal import TRANSITIONS
from causeway_server.edge_node.config.schema import Config
from causeway_server.edge_node.openapi import REQUEST_HEADERS, RESPONSE_HEADERS
from causeway_server.fleet.repository.fleet_file import ReplayDoc, RolloutDoc
from causeway_server.fleet.server import refusals as message_refusals
from causeway_server.router import errors
from causeway_server.router.bundle import refusals
from causeway_server.router.config import default_text, keys_of
from causeway_server.router.policy.file import PolicyDoc
from causeway_server.router.policy.outcomes import OUTCOMES
from causeway_server.router.policy.signals import SIGNALS
from causeway_server.router.realtime.event_log import MEANING as CLOSE_CODES
from causeway_server.router.realtime.event_log import CloseCode
from causeway_server.router.renames import RENAMED
from causeway_train.cli.commands import main as causeway_train
from tests.cloud_pool.redis.declared_keys import REDIS_KEYS

ROOT = Path(__file__).parents[2]
Rows = Iterable[Sequence[str]]


def table(head: Sequence[str], rows: Rows) -> str:
    """A Markdown table; `|` inside a cell is escaped."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


# --- configuration ---------------------------------------------------------------------------------------------------


_JOBS = re.compile(r"(jobs|streams|redis|tenants|identity)\b")
"""Sections of gateway.yaml that have a page of their own."""


def key_table(struct: type[msgspec.Struct], prefix: str = "", wanted: Callable[[str], object] = bool) -> str:
    """Each key of a configuration file that is wanted, as its struct describes it."""
    rows = []
    for name, key in keys_of(struct).items():
        if not wanted(name):
            continue
        default = default_text(name, key)
        shown = "required" if key.default is msgspec.NODEFAULT else default and f"`{default}`"
        rows.append((f"`{prefix}{name}`", shown, key.description))
    return table(("key", "default", "meaning"), rows)


# --- commands --------------------------------------------------------------------------------------------------------


EDGE_KEYS = {*keys_of(Config), "clouds.main.url", "clouds.main.key_file"}
"""The keys of edge.yaml: the help of a flag that sets a key is the key, and its `--help` describes it."""


def _commands(program: str, group: click.Command) -> str:
    return table(("command, option", "meaning", "default"), _command_rows(program, group))


def cloud_program() -> click.Group:
    """The program with the real commands in place of those that it imports on demand."""
    program = causeway_server.cloud_pool.cli.main
    real = {
        name: getattr(import_module(module, program.__package__), attribute)
        for name, (module, attribute, _) in program.ON_DEMAND.items()
    }
    return click.Group("causeway-cloud", {**program.main.commands, **real})


def _command_rows(path: str, command: click.Command) -> Iterator[tuple[str, str, str]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in sorted(command.list_commands(context)):
            child = command.get_command(context, name)
            assert child is not None
            yield from _command_rows(f"{path} {name}", child)
        return
    arguments = [one.make_metavar(click.Context(command)) for one in command.params if isinstance(one, click.Argument)]
    text = " ".join((command.help or "").replace("\b", "").split("\n\n")[0].split())
    yield " ".join(["`" + path, *arguments]) + "`", text, ""
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            context = click.Context(command)
            extra = option.get_help_extra(context)
            names = "/".join(option.opts[:1] + option.secondary_opts)
            value = "" if option.is_flag or option.count else f" {option.make_metavar(context)}"
            shown = "required" if option.required else f"`{extra['default']}`" if "default" in extra else ""
            text = option.help or ""
            yield f"&emsp;`{names}{value}`", f"Set the key `{text}`." if text in EDGE_KEYS else text, shown


# --- metrics ---------------------------------------------------------------------------------------------------------

_METRIC = re.compile(r"(causeway_(?:edge|gateway|jobs)|gen_ai_(?:server|client))_[a-z_]+")


def _help_texts(package: str) -> dict[str, str]:
    texts: dict[str, str] = {}
    for folder in (package, "router"):
        texts |= yaml.safe_load((ROOT / folder / "metrics.yaml").read_text(encoding="utf-8"))
    return texts


def _metrics(package: str) -> str:
    rows = [(f"`{name}`", text) for name, text in sorted(_help_texts(package).items())]
    return table(("metric", "meaning"), rows)


def metric_names(package: str) -> set[str]:
    """Every metric's name that stands as a string in the package, whole or without the package's prefix."""
    prefix = {"edge_node": "causeway_edge_", "cloud_pool": "causeway_gateway_"}[package]
    described, strings = _help_texts(package).keys(), set[str]()
    for path in [*(ROOT / package).rglob("*.py"), *(ROOT / "router" / "serving").rglob("*.py")]:
        constants = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Constant))
        strings |= {node.value for node in constants if isinstance(node.value, str)}
    whole = {name for name in strings if _METRIC.fullmatch(name)}
    return whole | {name for name in described if name.removeprefix(prefix) in strings}


def redis_keys() -> str:
    rows = [(f"`{key.pattern}`", key.type, key.owner, key.meaning, key.bound) for key in REDIS_KEYS]
    return table(("key", "type", "written by", "holds", "lifetime or limit"), rows)


def edge_headers() -> str:
    rows = [(f"`{name}`", "request", text) for name, text in REQUEST_HEADERS.items()]
    rows += [(f"`{name}`", "response", text) for name, text in RESPONSE_HEADERS.items()]
    return table(("header", "in", "meaning"), rows)


# --- errors, signals, policies ---------------------------------------------------------------------------------------


def error_table() -> str:
    rows = [
        (
            f"`{kind.code}`",
            str(kind.status),
            f"`{kind.type}`",
            "yes" if kind.retryable else "",
            kind.__name__,
            _summary(kind),
        )
        for kind in _tree(errors.CausewayError)
    ]
    return table(("code", "HTTP status", "type", "next target may answer", "class", "meaning"), rows)


def _tree(kind: type[errors.CausewayError]) -> Iterator[type[errors.CausewayError]]:
    yield kind
    for narrower in kind.__subclasses__():
        if narrower.__module__ == errors.__name__:
            yield from _tree(narrower)


def refusal_table() -> str:
    """The reasons for which a device refuses an update."""
    classes = [kind for kind in vars(refusals).values() if isinstance(kind, type)]
    kinds = [kind for kind in classes if issubclass(kind, refusals.UpdateRefused)]
    return table(("code", "class", "meaning"), [(f"`{kind.code}`", kind.__name__, _summary(kind)) for kind in kinds])


def message_refusal_table() -> str:
    """The reasons for which the control plane refuses a message of a device."""
    classes = [kind for kind in vars(message_refusals).values() if isinstance(kind, type)]
    kinds = [kind for kind in classes if issubclass(kind, errors.CausewayError)]
    kinds = [kind for kind in kinds if kind.__module__ == message_refusals.__name__]
    return table(("code", "status", "meaning"), [(f"`{k.code}`", str(k.status), _summary(k)) for k in kinds])


def device_states() -> str:
    """The states of a device's agent, and what follows them."""
    rows = []
    for state, events in TRANSITIONS.items():
        following = ", ".join(f"{event.name.lower()} → {after.name}" for event, after in events.items())
        rows.append((state.name, MEANING_OF_STATE[state], following))
    return table(("state", "the device", "then"), rows)


def _summary(kind: type) -> str:
    return " ".join((kind.__dict__.get("__doc__") or "").split("\n\n")[0].split())


def signal_table() -> str:
    rows = []
    for name, spec in SIGNALS.items():
        values = f" ({', '.join(value for value in spec.values if value)})" if spec.values else ""
        kind = f"{spec.type}, {spec.unit}" if spec.unit else spec.type
        rows.append((f"`{name}`", kind, spec.meaning + values, spec.absent or "never"))
    return table(("signal", "type", "meaning", "absent when"), rows)


def outcome_table() -> str:
    return table(
        ("signal", "type", "meaning"), [(f"`{name}`", one.type, one.meaning) for name, one in OUTCOMES.items()]
    )


def close_code_table() -> str:
    """Why a server closes a live session."""
    assert set(CLOSE_CODES) == set(CloseCode)
    return table(("code", "meaning"), [(f"`{code.value}`", CLOSE_CODES[code]) for code in CloseCode])


def renames_table() -> str:
    kinds = {"signal": "signal", "metric": "metric", "command": "command", "extra": "extra of pip", "model": "model"}
    rows = [
        (kinds.get(kind, kind), f"`{one.old}`", f"`{one.new}`" if one.new else "removed", one.note)
        for kind, found in RENAMED.items()
        for one in found
    ]
    return table(("in", "before", "now", "note"), rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "edge-config": lambda: key_table(Config),
    "edge-commands": lambda: _commands("causeway-edge", causeway_server.edge_node.cli.main.main),
    "edge-headers": edge_headers,
    "edge-metrics": lambda: _metrics("edge_node"),
    "gateway-config": lambda: key_table(GatewayConfig, wanted=lambda name: not _JOBS.match(name)),
    "gateway-config-jobs": lambda: key_table(GatewayConfig, wanted=_JOBS.match),
    "cloud-commands": lambda: _commands("causeway-cloud", cloud_program()),
    "redis-keys": redis_keys,
    "cloud-metrics": lambda: _metrics("cloud_pool"),
    "models-commands": lambda: _commands("causeway-models", causeway_server.models.cli.commands.main),
    "train-commands": lambda: _commands("causeway-train", causeway_train),
    "fleet-commands": lambda: _commands("causeway-fleet", causeway_server.fleet.cli.commands.main),
    "rollout-keys": lambda: key_table(RolloutDoc, "rollout."),
    "replay-keys": lambda: key_table(ReplayDoc, "replay."),
    "errors": error_table,
    "renames": renames_table,
    "close-codes": close_code_table,
    "refusals": refusal_table,
    "message-refusals": message_refusal_table,
    "device-states": device_states,
    "signals": signal_table,
    "outcomes": outcome_table,
    "policy-keys": lambda: key_table(PolicyDoc),
}
