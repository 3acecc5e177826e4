"""Changes of files that survive a power cut, from seven operations; a test can end the process before each of them."""

from __future__ import annotations

import shutil
from pathlib import Path

from router.serving.folders import sync


class Disk:
    """Files as the kernel has them. What was synced is there after a power cut; the rest may be there, in any order."""

    # --- operations --------------------------------------------------------------------------------------------------

    def create(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)

    def append(self, path: Path, content: bytes) -> None:
        with path.open("ab") as file:
            file.write(content)

    def sync(self, path: Path) -> None:
        sync(path)

    def sync_folder(self, path: Path) -> None:
        """Sync the names in a folder."""
        sync(path)

    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def link(self, path: Path, target: str) -> None:
        """Make a symbolic link at `path`."""
        path.symlink_to(target)

    def make_folder(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def remove(self, path: Path) -> None:
        """Remove a file or a whole folder, if it exists."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    # --- made of them ------------------------------------------------------------------------------------------------

    def replace_synced(self, path: Path, content: bytes) -> None:
        """Replace a file at once: after a crash it has the old content or the new."""
        partial = path.with_name(f"{path.name}.partial")
        self.create(partial, content)
        self.publish(partial, path)

    def publish(self, partial: Path, path: Path) -> None:
        """Give a complete file its name."""
        self.sync(partial)
        self.rename(partial, path)
        self.sync_folder(path.parent)

    def append_synced(self, path: Path, content: bytes) -> None:
        is_new = not path.exists()
        self.append(path, content)
        self.sync(path)
        if is_new:
            self.sync_folder(path.parent)

    def make_folders(self, path: Path) -> None:
        """Make a folder and those above it, each synced."""
        if path.is_dir():
            return
        self.make_folders(path.parent)
        self.make_folder(path)
        self.sync_folder(path.parent)
