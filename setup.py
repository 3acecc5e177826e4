"""The import package of the wheel: `causeway_server`, whose rooms are the folders at the top of the repository.

pyproject.toml has everything else. The policies hold no code: the default policy travels with the wheel.
"""

from setuptools import find_namespace_packages, setup

ROOMS = ("router", "models", "edge_node", "cloud_pool", "fleet", "policies")
APART = ("edge_node.sdk*", "models.train*")  # `sdk`, `sdk-ts`, training: distributions of their own

setup(
    package_dir={"causeway_server": "."},
    packages=[
        f"causeway_server.{package}"
        for package in find_namespace_packages(include=[*ROOMS, *(f"{room}.*" for room in ROOMS)], exclude=APART)
    ],
)
