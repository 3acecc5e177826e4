"""Which models `up` starts, and the policy that it writes for a pair."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from causeway_server.cloud_pool.config import Config as GatewayConfig
from causeway_server.cloud_pool.config import Flags
from causeway_server.cloud_pool.config import load_config as load_gateway_config
from causeway_server.edge_node.cli.up.models import KNOWLEDGE, TOUR, choose_models, pair_policy, read_vllm
from causeway_server.edge_node.config.schema import Config, EngineConfig
from causeway_server.edge_node.storage.policies import DEFAULT_POLICY
from causeway_server.models.catalog.artifact import ArtifactError, Manifest, find_artifact
from causeway_server.models.pull.demo import demo_models
from causeway_server.router.errors import PolicyError
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.types import Handoff

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A folder of models with copies of the assistant that answer with text, named small-x and large-x."""
    source = find_artifact("assistant")
    for name in ("small-x", "large-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.gguf").symlink_to(source.path)
        manifest = msgspec.structs.replace(source.manifest, name=name, answers="text")
        (tmp_path / name / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    return Config(engine=EngineConfig(model_dirs=(str(tmp_path),)))


def gateway(config: Config, folder: Path) -> GatewayConfig:
    """The gateway's configuration for the pair."""
    path = folder / "gateway.yaml"
    path.write_text(choose_models(config, "small-x", "large-x", with_cloud=True).gateway_text)
    return load_gateway_config(path, Flags())


def test_the_default_policy_s_models_are_started() -> None:
    models = choose_models(Config(), None, None, with_cloud=True)
    assert (models.policy_text, models.cloud, models.questions) == ("", ("assistant-large",), TOUR)


def test_a_policy_that_the_daemon_could_not_read_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_bytes((DEFAULT_POLICY.read_text() + "# f\xfcr\n").encode("latin-1"))
    with pytest.raises(PolicyError, match="not UTF-8"):
        choose_models(Config(policy=str(path)), None, None, with_cloud=True)


def test_a_pair_gets_a_policy_and_questions_of_general_knowledge(config: Config, tmp_path: Path) -> None:
    models = choose_models(config, "small-x", "large-x", with_cloud=True)
    targets = {target.name: (target.at, target.model) for target in parse_policy(models.policy_text, "up").targets}
    assert targets == {"small": ("edge", "small-x"), "large": ("cloud", "large-x")}
    assert (models.cloud, models.questions) == (("large-x",), KNOWLEDGE)
    assert models.model_dirs == (str(tmp_path),)


def test_a_large_model_in_the_cloud_gets_a_patient_gateway(config: Config, tmp_path: Path) -> None:
    """On a CPU a long prompt silences Triton for longer than the default bounds allow."""
    assert gateway(config, tmp_path).load_balancing == GatewayConfig().load_balancing
    manifest = msgspec.json.decode((tmp_path / "large-x" / "manifest.json").read_bytes(), type=Manifest)
    larger = msgspec.structs.replace(manifest, parameters=1_500_000_000)
    (tmp_path / "large-x" / "manifest.json").write_bytes(msgspec.json.encode(larger))
    assert gateway(config, tmp_path).load_balancing.hung_after_s > 60


def test_a_vllm_is_the_large_model_and_the_gateways_only_tier(config: Config, tmp_path: Path) -> None:
    """Its model is no artifact of this machine."""
    description = tmp_path / "vllm.json"
    description.write_text('{"command": ["python"], "environ": {"A": "1"}, "model": "tiny"}')
    models = choose_models(config, "small-x", None, with_cloud=True, vllm=read_vllm(description, 8000))
    targets = {target.name: (target.at, target.model) for target in parse_policy(models.policy_text, "up").targets}
    assert targets == {"small": ("edge", "small-x"), "large": ("cloud", "tiny")}
    assert models.cloud == ()
    (tmp_path / "gateway.yaml").write_text(models.gateway_text)
    (tier,) = load_gateway_config(tmp_path / "gateway.yaml", Flags()).tiers
    assert (tier.name, tier.upstream.kind) == ("tiny", "openai")
    assert (tier.upstream.urls, tier.upstream.without) == (("http://127.0.0.1:8000/v1",), ("tools",))


@pytest.mark.parametrize("content", [None, "{}", "nonsense"])
def test_a_vllm_that_is_not_there_is_refused_with_what_to_do(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "vllm.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ArtifactError, match=r"vllm\.json.*make run UPSTREAM=vllm"):
        read_vllm(path, 8000)


def test_a_calibrated_pair_gets_its_handoff(config: Config, tmp_path: Path) -> None:
    """Without one `up` says what to do; signals for other weights are said, and not used."""
    pytest.importorskip("onnxruntime")
    from causeway_server.models.signals.pair import ModelIdentity, PairHandoff
    from tests.edge_node.signals.test_calibrated_pair import publish

    path = tmp_path / "small-x" / "manifest.json"
    manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, sha256="1" * 64)))  # not the assistant's
    config = Config(engine=EngineConfig(model_dirs=(str(tmp_path), str(tmp_path / "models"))))
    raw = choose_models(config, "small-x", "large-x", with_cloud=True)
    assert "not calibrated" in raw.note
    assert "`causeway-models calibrate --small small-x --large large-x --prompts FILE`" in raw.note
    assert "after_tokens: 8, below: 0.55}" in raw.policy_text
    cases = {
        "": (Handoff(24, 0.663, 1.5), "takes over below a probability of 0.663"),
        "0" * 64: (Handoff(8, 0.55), "is not used: "),
    }
    for sha256, (handoff, note) in cases.items():
        pair = {"small": ModelIdentity("small-x", "1" * 64), "large": ModelIdentity("large-x", sha256)}
        publish(tmp_path, **pair, handoff=PairHandoff(24, 0.663, 1500))
        models = choose_models(config, "small-x", "large-x", with_cloud=True)
        assert note in models.note
        assert [one.handoff for one in parse_policy(models.policy_text, "up").routes if one.handoff] == [handoff]


def test_a_model_with_a_calibrator_of_its_own_needs_none() -> None:
    assert choose_models(Config(), "assistant", "assistant-large", with_cloud=True).note == ""
    assert "make run MODELS=smol" in choose_models(Config(), None, None, with_cloud=True).note


def test_one_of_a_pair_may_be_left_out(config: Config) -> None:
    assert choose_models(config, "small-x", None, with_cloud=True).cloud == ("assistant-large",)
    models = choose_models(config, None, "large-x", with_cloud=True)
    assert (models.cloud, models.questions) == (("large-x",), TOUR)


def test_without_a_cloud_only_the_device_s_model_must_be_here(config: Config) -> None:
    assert choose_models(config, "small-x", "far-away", with_cloud=False).cloud == ()
    with pytest.raises(ArtifactError, match=r"no model named .far-away.*`causeway-models pull SOURCE --name far-away`"):
        choose_models(config, "small-x", "far-away", with_cloud=True)


def test_a_policy_of_the_owner_s_is_followed(config: Config, tmp_path: Path) -> None:
    """Triton serves each cloud model once; a target of another name is no matter."""
    document = yaml.safe_load(pair_policy("small-x", "large-x"))
    document["targets"]["larger"] = {"at": "cloud", "model": "assistant-large"}
    document["targets"]["again"] = {"at": "cloud", "model": "large-x"}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    mine = msgspec.structs.replace(config, policy=str(path))
    models = choose_models(mine, None, None, with_cloud=True)
    assert models.cloud == ("large-x", "assistant-large")
    assert '{"name":"assistant-large","can":["chat","completion"]}' in models.gateway_text


def test_a_target_that_embeds_has_a_tier_that_does(config: Config, tmp_path: Path) -> None:
    """As the policy says of any target of the model."""
    assert [tier.can for tier in gateway(config, tmp_path).tiers] == [("chat", "completion")]
    document = yaml.safe_load(pair_policy("small-x", "large-x"))
    document["targets"]["vectors"] = {"at": "cloud", "model": "large-x", "can": ["embedding"]}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    mine = msgspec.structs.replace(config, policy=str(path))
    assert '"can":["chat","completion","embedding"]' in choose_models(mine, None, None, with_cloud=True).gateway_text


def test_a_name_that_cannot_stand_in_a_policy_is_refused(config: Config) -> None:
    with pytest.raises(PolicyError):
        choose_models(config, "x: {at: cloud}", None, with_cloud=True)


def test_make_run_starts_the_models_that_it_pulls() -> None:
    """`make run MODELS=NAME` pulls demo:NAME and starts `up` with the flags in UP_NAME."""
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    pairs = {
        name: words.split() for name, _, words in (line[3:].partition(" = ") for line in lines if line[:3] == "UP_")
    }
    assert set(pairs) == {pair for model in demo_models() for pair in model.pairs}
    for pair, (small_flag, small, large_flag, large) in pairs.items():
        assert (small_flag, large_flag) == ("--small", "--large")
        assert [small, large] == [model.name for model in demo_models() if pair in model.pairs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--small", "nothing"), "no model named 'nothing'"),
        (("--small", "assistant", "--policy", "policies/default.yaml"), "omit --small, --large and --vllm"),
    ],
)
def test_what_cannot_be_started_is_refused_before_anything_starts(
    tmp_path: Path, flags: tuple[str, ...], complaint: str
) -> None:
    command = [
        sys.executable,
        "-m",
        "causeway_server.edge_node",
        "up",
        "--once",
        "--run-dir",
        str(tmp_path / "runs"),
        *flags,
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert complaint in result.stderr
    assert not (tmp_path / "runs").exists()
