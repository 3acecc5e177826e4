"""The distributions: what the wheels put into site-packages, that the product runs from there, and their bytes."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.prepare import dist

from .sources import PACKAGES, ROOT

pytestmark = pytest.mark.slow  # builds wheels
EPOCH = 1_700_000_000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    dist.write_tree(folder, dist.tracked_files(ROOT), EPOCH)
    return folder


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory, source: Path) -> dict[str, Path]:
    """The wheels of product and SDK, by distribution, each from its sdist."""
    folder = tmp_path_factory.mktemp("wheels")
    for distribution in dist.PYTHON[:2]:
        dist.build_python(source / distribution, folder, EPOCH, folder / "build.log")
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


def test_a_second_build_has_the_same_bytes(wheels: dict[str, Path], source: Path, tmp_path: Path) -> None:
    """Also of a copy that was made at another place and time."""
    (source / "edge_node" / "sdk").rename(tmp_path / "sdk")
    os.utime(tmp_path / "sdk" / "README.md")
    dist.build_python(tmp_path / "sdk", tmp_path, EPOCH, tmp_path / "build.log")
    first = {path.name: path.read_bytes() for path in wheels["causeway_sdk"].parent.glob("causeway_sdk*")}
    assert len(first) == 2
    assert {name: (tmp_path / name).read_bytes() for name in first} == first


def test_all_distributions_have_one_version(tmp_path: Path) -> None:
    """And all get another one at once."""
    assert len(set(dist.versions(ROOT))) == 1
    count = len(dist.versions(ROOT))
    dist.write_tree(tmp_path, {str(path.relative_to(ROOT)): path.read_bytes() for path in dist.version_files(ROOT)}, 0)
    dist.set_version(tmp_path, "9.8.7")
    assert dist.versions(tmp_path) == ["9.8.7"] * count
    texts = [path.read_text(encoding="utf-8") for path in dist.version_files(tmp_path)]
    assert len(texts) > 8
    assert [text for text in texts if "9.8.7" not in text] == []


def test_the_bill_of_materials_names_the_locked_packages() -> None:
    parts = {str(part["name"]): part for part in dist.locked_components(ROOT)}
    assert parts["llama-cpp-python"]["purl"] == f"pkg:pypi/llama-cpp-python@{parts['llama-cpp-python']['version']}"
    assert len(parts) > 80
    assert [name for name, part in parts.items() if not part["hashes"]] == []


def _names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if ".dist-info/" not in name]


def test_each_wheel_has_one_name_in_site_packages(wheels: dict[str, Path]) -> None:
    product = _names(wheels["causeway_router"])
    assert {name.split("/")[0] for name in product} == {"causeway_server"}
    assert {name.split("/")[1] for name in product} == {*PACKAGES, "policies"}
    assert {name.split("/")[0] for name in _names(wheels["causeway_sdk"])} == {"causeway_sdk"}


def test_the_wheel_of_the_product_holds_the_product_alone(wheels: dict[str, Path]) -> None:
    """SDK and training are distributions of their own; data and templates travel along, images of pages do not."""
    product = set(_names(wheels["causeway_router"]))
    apart = ("causeway_server/edge_node/sdk/", "causeway_server/edge_node/sdk-ts/", "causeway_server/models/train/")
    assert [name for name in product if name.startswith(apart)] == []
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    rooms = (*(f"{package}/" for package in PACKAGES), "policies/")
    files = {f"causeway_server/{name}" for name in tracked.stdout.split("\0") if name.startswith(rooms)}
    left = {name for name in files if not name.startswith(apart)} - product
    assert [name for name in left if not name.endswith((".png", ".Dockerfile"))] == []


def test_the_product_runs_from_its_wheels_beside_a_foreign_causeway(wheels: dict[str, Path], tmp_path: Path) -> None:
    """PyPI's `causeway` is somebody else's, with that import name. A child process finds the wheel, too."""
    site = tmp_path / "site-packages"
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    (site / "causeway").mkdir()
    (site / "causeway" / "__init__.py").write_text("raise AssertionError('the foreign package was imported')")
    program = """
import sys
from causeway_sdk import Causeway
from causeway_server.cloud_pool.cli.main import main as cloud
from causeway_server.edge_node.cli.main import main as edge
from causeway_server.fleet.cli.commands import main as fleet
from causeway_server.models.child_process import child_environment
from causeway_server.models.cli.commands import main as models
from causeway_server.models.catalog.artifact import SHIPPED
from causeway_server.edge_node.storage.policies import DEFAULT_POLICY
site = sys.argv[1]
for command in (cloud, edge, fleet, models):
    assert sys.modules[command.callback.__module__].__file__.startswith(site)
assert child_environment()["PYTHONPATH"].split(":")[0] == site
assert SHIPPED.is_relative_to(site) and SHIPPED.is_dir() and DEFAULT_POLICY.is_file()
"""
    environ = {**os.environ, "PYTHONPATH": str(site)}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program, str(site)],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
