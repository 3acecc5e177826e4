"""The configuration: layers, units, and errors that name the place."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from causeway_server.edge_node.config.loader import (
    PREFIX,
    build,
    config_keys,
    config_variable,
    load_config,
    read_yaml,
    schema_key,
)
from causeway_server.edge_node.config.schema import CloudServer, Config
from causeway_server.router.errors import ConfigError

EXAMPLE = Path(__file__).parents[3] / "edge_node" / "deploy" / "edge.example.yaml"
HOME = {"HOME": "/home/kiosk"}
SHA = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "edge.yaml"
    path.write_text(text)
    return path


def test_the_defaults_apply_without_a_file() -> None:
    """Loopback, port 8080, no cloud."""
    config = load_config(None, HOME, {})
    assert config == msgspec.structs.replace(Config(), state_dir="/home/kiosk/.local/state/causeway")


def test_flags_override_the_environment_and_the_environment_the_file(tmp_path: Path) -> None:
    """Each layer overrides only the keys that it sets."""
    path = write(tmp_path, "server: {host: 0.0.0.0, port: 1, drain_s: 5}\n")
    environ = HOME | {"CAUSEWAY_SERVER__PORT": "2", "CAUSEWAY_SERVER__DRAIN_S": "6s"}
    config = load_config(path, environ, {"server.port": 3, "server.socket": None})
    assert (config.server.host, config.server.port, config.server.drain_s) == ("0.0.0.0", 3, 6.0)
    assert config.server.socket == ""


def test_every_key_can_be_set_from_the_environment() -> None:
    """The default of each key, written as text, is read back as the same value."""
    defaults = Config()
    environ = dict(HOME)
    for key in config_keys():
        if ".NAME." in key:
            continue
        value = msgspec.to_builtins(_at(defaults, key))
        environ[config_variable(key)] = ",".join(value) if isinstance(value, (list, tuple)) else str(value)
    environ |= {f"CAUSEWAY_CLOUDS__EU_1__{name}": value for name, value in (("URL", "http://c/v1"), ("KEY", "t"))}
    config = load_config(None, environ, {})
    assert config.clouds == {"eu_1": CloudServer(url="http://c/v1", key="t")}
    config = msgspec.structs.replace(config, clouds={})
    assert msgspec.structs.replace(config, state_dir="") == defaults


def _at(config: object, key: str) -> object:
    for name in key.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize(
    ("written", "expected"),
    [("30", 30.0), ("1.5", 1.5), ("500ms", 0.5), ("45s", 45.0), ("10m", 600.0), ("2h", 7200.0), ("'7d'", 604800.0)],
)
def test_durations_may_carry_a_unit(tmp_path: Path, written: str, expected: float) -> None:
    path = write(tmp_path, f"decisions: {{max_age_s: {written}}}\n")
    assert load_config(path, HOME, {}).decisions.max_age_s == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [("1048576", 2**20), ("64KiB", 65536), ("32MiB", 2**25), ("1GB", 10**9), ("1.5 MiB", 1572864), ("64M", 2**26)],
)
def test_sizes_may_carry_a_unit(tmp_path: Path, written: str, expected: int) -> None:
    """MB is decimal, MiB binary, and M is binary as in systemd."""
    path = write(tmp_path, f"cache: {{memory_bytes: {written}}}\n")
    assert load_config(path, HOME, {}).cache.memory_bytes == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("a,b", ("a", "b")),
        ("[a, b]", ("a", "b")),
        ('["a", "b, c"]', ("a", "b, c")),
        ("[ /opt/models ]", ("/opt/models",)),
        ("[]", ()),
    ],
)
def test_a_list_on_the_command_line_is_written_as_in_a_file(written: str, expected: tuple[str, ...]) -> None:
    folders = load_config(None, HOME, {"engine.model_dirs": written}).engine.model_dirs
    assert tuple(str(Path(folder)) for folder in folders) == tuple(str(Path(one).absolute()) for one in expected)


def test_a_list_of_mappings_on_the_command_line_is_written_as_in_a_file() -> None:
    keys = load_config(None, HOME, {"server.keys": f"[{{name: till, sha256: {SHA}, tags: [private]}}]"}).server.keys
    assert [(key.name, key.tags) for key in keys] == [("till", ("private",))]


def test_a_duration_in_a_list_of_mappings_may_carry_a_unit(tmp_path: Path) -> None:
    path = write(tmp_path, "mqtt: {topics: [{filter: plant/ask, deadline_s: 10m}]}\n")
    assert load_config(path, HOME, {}).mqtt.topics[0].deadline_s == 600.0


def test_a_list_that_is_not_closed_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"engine.model_dirs: Must be a list of strings, not '\[a, b'"):
        load_config(None, HOME, {"engine.model_dirs": "[a, b"})


REJECTED = [
    ("server: {prot: 1}", "edge.yaml:1: server.prot", "Did you mean `server.port`?"),
    ("port: 1", "edge.yaml:1: port", "Did you mean `server.port`?"),
    ("sever: {port: 1}", "edge.yaml:1: sever", "Did you mean `server`?"),
    ("log: info\nfrobnicate: 1", "edge.yaml:2: frobnicate", "Known keys: cache, cloud, clouds, decisions"),
    ("server:\n  port: eighty", "edge.yaml:2: server.port", "an integer, at least 0 and at most 65535, not 'eighty'"),
    ("server:\n  port: 99999", "edge.yaml:2: server.port", "at most 65535, not 99999"),
    ("server:\n  port: '8080'", "edge.yaml:2: server.port", "not '8080'"),
    ("server: {port: 1:30}", "server.port", "not '1:30'"),
    ("server:\n  port: true", "edge.yaml:2: server.port", "not True"),
    ("server:\n  port:", "edge.yaml:2: server.port", "empty (set a value or remove the key)"),
    ("server: {host: 127}", "server.host", "Must be a string, not 127"),
    ("server: {drain_s: -1}", "server.drain_s", "a duration in seconds (30, 500ms, 10m, 7d), at least 0, not -1"),
    ("server: {drain_s: 5 fortnights}", "server.drain_s", "not '5 fortnights'"),
    ("server: {read_timeout_s: .inf}", "server.read_timeout_s", "not '.inf'"),
    ("server: {read_timeout_s: .nan}", "server.read_timeout_s", "not '.nan'"),
    ("cache: {memory_bytes: 5 parsecs}", "cache.memory_bytes", "a size in bytes (1048576, 64MiB, 1GB)"),
    ("engine: {enabled: maybe}", "engine.enabled", "true or false, not 'maybe'"),
    ("engine: {gpu_layers: some}", "engine.gpu_layers", "an integer, at least -1 or one of auto, not 'some'"),
    ("engine: {gpu_layers: -2}", "engine.gpu_layers", "not -2"),
    ("engine: {model_dirs: 7}", "engine.model_dirs", "a list of strings, not 7"),
    ("log: loud", "edge.yaml:1: log", "one of debug, error, info, warning, not 'loud'"),
    ("clouds: {eu: {url: gateway.example}}", "clouds.eu.url", "a URL like https://cloud.example/v1"),
    ("clouds: {eu: {url: 'ftp://x/v1'}}", "clouds.eu.url", "a URL like"),
    ("clouds: {eu: {url: ''}}", "clouds.eu.url", "a URL like"),
    ("clouds: {eu: {key: a, key_file: b}}", "clouds.eu.key", "not both"),
    ("clouds: {eu: {region: eu}}", "edge.yaml:1: clouds.eu", "The cloud needs a `url`."),
    ("clouds: {EU: {url: 'http://c/v1'}}", "edge.yaml:1: clouds.EU", "This is not a cloud's name."),
    ("clouds: {rtt_ms: {url: 'http://c/v1'}}", "edge.yaml:1: clouds.rtt_ms", "is reserved"),
    ("clouds: {eu: {uri: 'http://c/v1'}}", "edge.yaml:1: clouds.NAME.uri", "Did you mean `clouds.NAME.url`?"),
    ("clouds: {eu: 'http://c/v1'}", "edge.yaml:1", "The value must be a mapping"),
    ("clouds: [eu]", "edge.yaml:1", "The value must be a mapping"),
    (
        "cloud:\n  url: http://c/v1",
        "edge.yaml:2: cloud.url",
        "`cloud.url` is now `clouds.main.url`. `causeway-edge migrate`",
    ),
    ("cloud: {api_key: a}", "edge.yaml:1: cloud.api_key", "is now `clouds.main.key`"),
    (f"server: {{keys: [{{name: a, sha256: {SHA}, tag: x}}]}}", "server.keys", "unknown field"),
    ("server: {keys: [{name: a, sha256: plain}]}", "server.keys[0].sha256", "Must be 64 hexadecimal digits"),
    ("parts: {language: german}", "parts.language", "a code of ISO 639-1, such as en, not 'german'"),
    ("server: 5", "edge.yaml:1", "server: The value must be a mapping"),
    ("- a\n- b", "edge.yaml:1", "The value must be a mapping"),
    ("server: {port: 1}\nserver: {port: 2}", "edge.yaml:2: server", "appears twice"),
    ("server: &a {port: 1}\ncache: *a", "edge.yaml:1", "anchors"),
    ("server: {port: 1", "edge.yaml", "not valid YAML"),
    ("server: !!python/object:os.system {}", "edge.yaml:1", "tags are not allowed"),
    ("log: \x00", "edge.yaml", "not valid YAML"),
]


@pytest.mark.parametrize(("text", "where", "message"), REJECTED)
def test_an_invalid_file_is_rejected_with_line_key_and_the_expected_value(
    tmp_path: Path, text: str, where: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), HOME, {})
    assert where in re.sub(r"(yaml:\d+):\d+", r"\1", str(caught.value))  # the column is there too
    assert message in str(caught.value)


@pytest.mark.parametrize(("written", "value"), [("auto", "auto"), ("-1", -1), ("20", 20)])
def test_a_number_or_a_word_is_read_from_every_layer(tmp_path: Path, written: str, value: object) -> None:
    from_file = load_config(write(tmp_path, f"engine: {{gpu_layers: {written}}}"), HOME, {})
    from_environment = load_config(None, HOME | {"CAUSEWAY_ENGINE__GPU_LAYERS": written}, {})
    from_flag = load_config(None, HOME, {"engine.gpu_layers": written})
    assert {config.engine.gpu_layers for config in (from_file, from_environment, from_flag)} == {value}


def test_a_secret_in_an_error_is_not_shown(tmp_path: Path) -> None:
    """A token of the wrong type is rejected."""
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "clouds: {eu: {key: 123456789}}"), HOME, {})
    assert "123456789" not in str(caught.value)


def test_unknown_variables_in_known_sections_are_rejected() -> None:
    """So are variables that closely resemble a known one."""
    for variable, suggestion in (
        ("CAUSEWAY_SERVER__PROT", "server.port"),
        ("CAUSEWAY_SERVR__PORT", "server.port"),
        ("CAUSEWAY_POLCY", "policy"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"${variable}")) as caught:
            load_config(None, HOME | {variable: "1"}, {})
        assert suggestion in str(caught.value)


def test_variables_of_other_causeway_programs_are_ignored() -> None:
    """The SDK's and the gateway's variables share the prefix."""
    load_config(None, HOME | {"CAUSEWAY_URL": "x", "CAUSEWAY_API_KEY": "y", "CAUSEWAY_GATEWAY__PORT": "1"}, {})


def test_an_invalid_variable_is_rejected_with_its_name() -> None:
    with pytest.raises(ConfigError, match=r"\$CAUSEWAY_SERVER__PORT: server.port: Must be an integer"):
        load_config(None, HOME | {"CAUSEWAY_SERVER__PORT": "many"}, {})


def test_unknown_flags_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"command line: server.prot: .*server.port"):
        load_config(None, HOME, {"server.prot": "1"})


def test_the_token_is_read_from_a_file(tmp_path: Path) -> None:
    """The path is relative to the configuration file."""
    (tmp_path / "token").write_text("secret-token\n")
    config = load_config(write(tmp_path, "clouds: {eu: {url: 'https://c.example/v1/', key_file: token}}"), HOME, {})
    assert (config.clouds["eu"].key, config.clouds["eu"].url) == ("secret-token", "https://c.example/v1")


@pytest.mark.parametrize("content", [None, "", "two\nlines\n"])
def test_an_invalid_token_file_is_rejected(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "token").write_text(content)
    with pytest.raises(ConfigError, match="token"):
        load_config(write(tmp_path, "clouds: {eu: {url: http://c/v1, key_file: token}}"), HOME, {})


def test_a_token_in_the_environment_overrides_a_token_file_in_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "clouds: {eu: {url: http://c/v1, key_file: missing}}")
    assert load_config(path, HOME | {"CAUSEWAY_CLOUDS__EU__KEY": "t"}, {}).clouds["eu"].key == "t"


def test_relative_paths_in_the_file_are_relative_to_the_file(tmp_path: Path) -> None:
    """Those in flags and variables are relative to the working directory."""
    path = write(tmp_path, "policy: p.yaml\nstate_dir: state\nengine: {model_dirs: [m, /abs]}\n")
    config = load_config(path, HOME, {})
    assert config.policy == str(tmp_path / "p.yaml")
    assert config.state_dir == str(tmp_path / "state")
    assert config.engine.model_dirs == (str(tmp_path / "m"), "/abs")
    environ = HOME | {"CAUSEWAY_ENGINE__MODEL_DIRS": "m, /abs"}
    assert load_config(path, environ, {}).engine.model_dirs == (str(Path.cwd() / "m"), "/abs")
    assert load_config(path, HOME, {"policy": "q.yaml"}).policy == str(Path.cwd() / "q.yaml")


def test_systemd_sets_the_state_folder() -> None:
    """`StateDirectory=` overrides the home, and an explicit key overrides both."""
    environ = HOME | {"STATE_DIRECTORY": "/var/lib/causeway:/var/lib/other"}
    assert load_config(None, environ, {}).state_dir == "/var/lib/causeway"
    assert load_config(None, HOME | {"XDG_STATE_HOME": "/x"}, {}).state_dir == "/x/causeway"
    assert load_config(None, environ, {"state_dir": "/mine"}).state_dir == "/mine"


def test_a_missing_or_binary_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: Cannot read"):
        load_config(tmp_path / "none.yaml", HOME, {})
    (tmp_path / "bin.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bin\.yaml: .*UTF-8"):
        load_config(tmp_path / "bin.yaml", HOME, {})


def test_a_section_of_comments_keeps_its_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "server:\ncache:\n"), HOME, {}).server == Config().server


def test_the_example_file_holds_every_key_with_its_default() -> None:
    """It is still valid with every key uncommented."""
    text = EXAMPLE.read_text()
    active = read_yaml(text, EXAMPLE.name)
    assert build(active) == Config()
    uncommented = re.sub(r"^(\s*)# ((?: {2,})?(?:- )?[a-z0-9_]+:)", r"\1\2", text, flags=re.MULTILINE)
    everything = read_yaml(uncommented, EXAMPLE.name)
    assert {schema_key(key) for key in everything} == set(config_keys())
    build(everything)


def test_the_environment_prefix_is_what_the_documentation_says() -> None:
    assert (PREFIX, config_variable("server.port")) == ("CAUSEWAY_", "CAUSEWAY_SERVER__PORT")


def test_a_mapping_on_the_command_line_is_written_as_in_a_file() -> None:
    key = "jobs.webhooks.regions"
    config = load_config(None, HOME, {key: "{hooks.example: eu-central}"})
    assert config.jobs.webhooks.regions == {"hooks.example": "eu-central"}
    for wrong in ("hooks.example", "{hooks.example: [eu]}", "{hooks.example"):
        with pytest.raises(ConfigError, match=r"a mapping, such as|regions\[...\]: Expected `str`"):
            load_config(None, HOME, {key: wrong})
