"""The TypeScript SDK, compiled, and the packages of npm that its development and the tests' clients need.

`npm ci` installs exactly what a `package-lock.json` pins, by hash; the locks do not name a registry.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from .places import Places
from .programs import NODE
from .progress import Progress, Step, StepFailed, digest, run

OLDEST = 20
_SKIP = "Or continue without it: CAUSEWAY_SKIP=node make ..."
_ADVICE = f"Is the network up? npm's own settings are honoured (npm config). The same command goes on. {_SKIP}"


def node_steps(places: Places, stamps: Path) -> list[Step]:
    """Return the steps: packages to compile the SDK, the SDK, the clients."""
    sdk, clients = places.root / "edge_node" / "sdk-ts", places.root / "tests" / "clients"
    compiler = sdk / "node_modules" / "typescript" / "bin" / "tsc"
    sources = [sdk / "package-lock.json", sdk / "tsconfig.json", *sorted((sdk / "src").glob("*.ts"))]

    def compile_sdk(_progress: Progress) -> str:
        advice = "The log has the compiler's errors."
        run([NODE.find() or "node", compiler, "-p", sdk], log=places.logs / "sdk-ts.log", advice=advice)
        return "TypeScript SDK"

    compiled = Step(
        title="TypeScript SDK",
        stamp=stamps / "sdk-ts",
        key=digest(str(places.root), *sources),
        there=(sdk / "dist" / "index.js").exists,
        work=compile_sdk,
    )
    return [_packages(places, stamps, "typescript", sdk), compiled, _packages(places, stamps, "clients", clients)]


def require_node() -> str:
    """Return npm beside a Node.js that is new enough. Raises StepFailed."""
    node, npm = NODE.find(), NPM.find()
    if node is None or npm is None:
        raise StepFailed(f"There is no {'npm' if node else 'Node.js'}.", NODE.advice)
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    if not version.startswith("v") or int(version[1:].partition(".")[0]) < OLDEST:
        raise StepFailed(f"Node.js {OLDEST} or newer is required, but {node} is {version or 'broken'}.", _SKIP)
    return npm


NPM = NODE._replace(programs=["npm"])


def _packages(places: Places, stamps: Path, name: str, folder: Path) -> Step:
    def install(progress: Progress) -> str:
        npm = require_node()
        quiet = ["--no-audit", "--no-fund", "--loglevel=error", "--prefer-offline"]
        run([npm, "ci", *quiet], log=places.logs / f"npm-{name}.log", progress=progress, advice=_ADVICE, cwd=folder)
        return f"packages of npm for {name}"

    wanted = json.loads((folder / "package.json").read_text(encoding="utf-8"))
    one = next(iter({**wanted.get("devDependencies", {}), **wanted.get("dependencies", {})}))
    return Step(
        title=f"packages of npm for {name}",
        stamp=stamps / f"npm-{name}",
        key=digest(str(places.root), folder / "package.json", folder / "package-lock.json"),
        there=(folder / "node_modules" / one / "package.json").exists,
        work=install,
    )
