"""`make site`: the pages as a site of MkDocs Material in build/site, built without a network.

The pages stay where they are in the repository; a copy of them, with the images that they show, is what MkDocs reads.
Links to files that are no pages become their text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from .pages import pages
from .tables import ROOT

CONFIG = ROOT / "docs" / "mkdocs.yml"
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?:|mailto:|#)(?P<target>[^)\s]+)\)")
_INFO = re.compile(r"^( *```[\w-]*)[^\n`]*$", re.MULTILINE)


def site_pages(folder: Path) -> None:
    """Write the pages and their images into an empty folder, with their paths of the repository."""
    shutil.rmtree(folder, ignore_errors=True)
    names = {str(page.relative_to(ROOT)) for page in pages()}
    for name in sorted(names):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        text = _INFO.sub(r"\1", (ROOT / name).read_text(encoding="utf-8"))
        target.write_text(_LINK.sub(partial(_link, page=name, names=names, folder=folder), text), encoding="utf-8")


def _link(link: re.Match[str], page: str, names: set[str], folder: Path) -> str:
    """Return the link as it is on the site, and copy the image that it shows."""
    path = os.path.normpath(Path(page).parent / link["target"].partition("#")[0])
    if path in names:
        return link[0]
    if not link["image"]:
        return link["text"]
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / path, folder / path)
    return link[0]


def main(program: str) -> int:
    site_pages(ROOT / "build" / "pages")
    command = [program, "build", "--strict", "--quiet", "--config-file", str(CONFIG)]
    status = subprocess.run(command, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}).returncode
    if status == 0:
        print(f"{ROOT / 'build' / 'site' / 'index.html'}")
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
