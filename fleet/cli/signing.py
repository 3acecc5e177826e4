"""The commands `causeway-fleet keys | sign | diff`, which need the packages of the extra `causeway-router[fleet]`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from causeway_server.router.bundle.refusals import UpdateRefused
from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.process import option

from ..repository.build import BuiltBundle, build_bundles
from ..repository.folder import CheckedFleet, check_fleet
from .output import new_console, print_problems
from .proofs import print_comparison
from .rollout_output import manifest_changes

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

    from ..trust.keys import Trust
    from ..trust.offline import RoleReport
    from ..trust.published import PublishedFolder

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
HOST = re.compile(r"[A-Za-z0-9*][A-Za-z0-9.:-]{0,252}")
_EXTRA = ("tuf", "securesystemslib", "cryptography")
_Folder = click.Path(path_type=Path, file_okay=False)
_File = click.Path(path_type=Path, dir_okay=False, exists=True)
_keys_option = option("--keys", "Folder that has the key files.", _Folder, Path("keys"), to="folder")


@click.group()
def keys() -> None:
    """Make and list the keys that sign a fleet."""


@keys.command("new")
@click.argument("name")
@_keys_option
@option("--passphrase", "Ask for a passphrase with which the private key is encrypted.", is_flag=True)
@option("--passphrase-file", "File whose only line is the passphrase that encrypts the private key.", _File)
def new(name: str, folder: Path, passphrase: bool, passphrase_file: Path | None) -> None:
    """Make a pair of keys, NAME.pem and NAME.pub. NAME.pem is private: store it safely. NAME.pub is public: commit it
    to git, where trust.yaml refers to it.

    Exit code: 0 made, 1 a key of this name exists already, 2 bad arguments.
    """
    if NAME.fullmatch(name) is None:
        raise click.BadParameter("A name has 1 to 64 characters: letters, digits and . _ -", param_hint="NAME")
    secret = passphrase_file.read_bytes().strip() if passphrase_file else None
    if passphrase and secret is None:
        secret = click.prompt("Passphrase", hide_input=True, confirmation_prompt=True).encode()
    with readable_errors():
        from ..trust.keys import new_key

        made = new_key(folder, name, secret)
    click.echo(f"Wrote {folder / name}.pem (private) and {folder / name}.pub, key {made.keyid[:12]}.")


@keys.command("list")
@_keys_option
def list_(folder: Path) -> None:
    """List the keys in a folder, and say for which of them the private key is present."""
    with readable_errors():
        from ..trust.keys import is_encrypted, list_keys

        found = list_keys(folder)
        if not found:
            click.echo(f"No keys (*.pub) in {folder}.", err=True)
        for key in found:
            private = folder / f"{key.name}.pem"
            state = "public" if not key.private else "encrypted" if is_encrypted(private) else "private"
            click.echo(f"{key.name:20} {key.keyid[:12]}  {state}")


@click.group()
def tls() -> None:
    """Make the CA and the certificates of a fleet's servers."""


@tls.command("init")
@click.argument("folder", type=_Folder)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def init_tls(folder: Path, names: tuple[str, ...]) -> None:
    """Make a CA in FOLDER if it has none, and a certificate for each server. NAME is the server's host name or address.

    FOLDER/ca.pem is what clients trust. FOLDER/ca.key signs: only the control plane needs it (`serve --device-ca`).
    Each server gets NAME.pem and NAME.key, for a year; remove them and run the command again to renew them.

    Exit code: 0 made, 1 a certificate exists already, 2 bad arguments.
    """
    for name in names:
        if HOST.fullmatch(name) is None:
            raise click.BadParameter(f"{name!r} is not a host name or an address.", param_hint="NAME")
    with readable_errors():
        from ..trust.certificates import init

        for path in init(folder, names, datetime.now(UTC).timestamp()):
            click.echo(f"Wrote {path}.")


@click.command()
@click.argument("folder", type=_Folder)
@option("--key", "Private key that signs. May be repeated.", _File, to="key_files", multiple=True, required=True)
@option(
    "--passphrase-file",
    "File with the passphrase of encrypted private keys. Default: the command asks for the passphrase.",
    _File,
)
def sign(folder: Path, key_files: tuple[Path, ...], passphrase_file: Path | None) -> None:
    """Sign the changes of the fleet in FOLDER with the given keys. Metadata with enough signatures is published.

    Metadata that lacks signatures waits in FOLDER/pending for the next signer; FOLDER/published holds the static files
    for the devices. With the keys of rollout, snapshot and timestamp, the published files become visible to the
    devices. Exit code: 0 signed, 1 the fleet has errors, or a key is invalid.
    """
    checked = valid_fleet(folder)
    with readable_errors():
        sign_fleet(checked, load_signers(key_files, passphrase_file))


@keys.command("holders")
@click.argument("folder", type=_Folder)
@click.argument("files", nargs=-1, required=True, type=_File, metavar="NAME.pub...")
@option("--threshold", "Number of these keys that must sign a change.", click.IntRange(min=1), 2)
@option("--key", "Private key that signs this change. May be repeated.", _File, to="key_files", multiple=True)
@option(
    "--passphrase-file",
    "File with the passphrase of encrypted private keys. Default: the command asks for the passphrase.",
    _File,
)
def holders(
    folder: Path, files: tuple[Path, ...], threshold: int, key_files: tuple[Path, ...], passphrase_file: Path | None
) -> None:
    """Make the public keys NAME.pub the only keys of the roles root and artifacts in FOLDER. For example, several
    people can put their own keys in the place of the single key that `quick` made.

    Writes trust.yaml again, without its comments, and signs like `sign`. Enough of the earlier holders and of the new
    ones must sign. Devices follow by themselves. Exit code: 0 done, 1 the fleet has errors, or a key is invalid.
    """
    checked = valid_fleet(folder)
    with readable_errors():
        from ..trust.keys import write_holders

        signers = load_signers(key_files, passphrase_file)  # before anything is written
        write_holders(folder, files, threshold)
        click.echo(
            f"Wrote {folder / 'trust.yaml'}: {threshold} of these holders must sign: "
            f"{', '.join(file.stem for file in files)}."
        )
        sign_fleet(checked, signers)


def sign_fleet(checked: CheckedFleet, keys: Mapping[Path, CryptoSigner]) -> bool:
    """Sign a fleet's changes, and say what is published; return whether all is. Raises ConfigError, OSError."""
    folder = checked.folder
    from ..trust.keys import read_trust
    from ..trust.offline import sign_offline, signed_manifests
    from ..trust.online import holds_online_role, publish_online
    from ..trust.published import PublishedFolder

    trust, problems = read_trust(folder)
    if trust is None:
        print_problems(new_console(), problems)
        raise SystemExit(1)
    published, now = PublishedFolder(folder), datetime.now(UTC)
    _refuse_strangers(trust, published, keys)
    signers = list(keys.values())
    reports = sign_offline(checked, trust, published, signers, now)
    for report in reports:
        click.echo(_describe(report))
    if holds_online_role(trust, signers):
        version = publish_online(trust, published, signers, now)
        timestamp = published.timestamp()
        assert timestamp is not None
        until = f"until {timestamp.signed.expires:%Y-%m-%d %H:%M}Z unless it is renewed"
        click.echo(f"Published the metadata with timestamp version {version}. Devices accept it {until}.")
    for cohort, manifest in signed_manifests(published).items():
        for sha256 in published.missing_blobs(manifest):
            click.echo(
                f"Note: the cohort {cohort} needs the blob {sha256}. Upload the blob to {published.path / 'blobs'}."
            )
    return all(report.published for report in reports)


@click.command()
@click.argument("folder", type=_Folder)
def diff(folder: Path) -> None:
    """Show the changes of the fleet in FOLDER since the last signed bundles, and prove what may leave the devices.

    Exit code: 0 nothing more may leave, 1 more may leave, or the fleet has errors, 3 this is undecided.
    """
    checked = valid_fleet(folder)
    with readable_errors():
        from ..trust.offline import signed_manifests
        from ..trust.published import PublishedFolder

        published = PublishedFolder(folder)
        signed = signed_manifests(published)
        built = build_bundles(checked, signed, int(datetime.now(UTC).timestamp()))
        codes = {0}
        for name, bundle in built.items():
            old = signed.get(name)
            changes = manifest_changes(old, bundle.manifest)
            click.echo(f"{name}: {'no change' if not changes else f'serial {bundle.manifest.serial}'}")
            for change in changes:
                click.echo(f"  {change}")
            if old is not None and old.policy != bundle.manifest.policy:
                codes.add(_print_policy_diff(published.path / "blobs" / old.policy.sha256, bundle))
        for name in sorted(set(signed) - set(built)):
            click.echo(
                f"{name}: the cohort was removed from fleet.yaml, and its devices keep the bundle that they run."
            )
        raise SystemExit(1 if 1 in codes else max(codes))


def valid_fleet(folder: Path) -> CheckedFleet:
    """Return a checked fleet; print its errors and exit with 1 if it has any."""
    checked = check_fleet(folder)
    problems = [*checked.problems, *(problem for policy in checked.policies for problem in policy.problems)]
    if any(problem.severity == "error" for problem in problems):
        print_problems(new_console(), problems)
        raise SystemExit(1)
    return checked


def load_signers(paths: Sequence[Path], passphrase_file: Path | None) -> dict[Path, CryptoSigner]:
    """Read private keys, asking for passphrases unless a file has them. Raises KeyInvalid, or OSError."""
    from ..trust.keys import is_encrypted, load_signer

    secret = passphrase_file.read_bytes().strip() if passphrase_file else None

    def ask(path: Path) -> bytes:
        return secret or click.prompt(f"Passphrase of {path}", hide_input=True).encode()

    return {path: load_signer(path, ask(path) if is_encrypted(path) else None) for path in paths}


def _refuse_strangers(trust: Trust, published: PublishedFolder, signers: Mapping[Path, CryptoSigner]) -> None:
    """Raise ClickException if a key has a role neither in `trust.yaml` nor in the published root."""
    root = published.root()
    known = {*trust.names, *(() if root is None else root.signed.keys)}  # earlier holders of a role sign its change
    for path, signer in signers.items():
        if signer.public_key.keyid not in known:
            names = ", ".join(sorted(trust.names.values()))
            raise click.ClickException(
                f"{path}: nothing was signed, because this key has no role in trust.yaml. Keys with a role: {names}."
            )


def _describe(report: RoleReport) -> str:
    if report.published:
        by = f", signed by {', '.join(report.signed)}" if report.signed else ", unchanged"
        return f"{report.role} version {report.version}: published{by}"
    have = f"{len(report.signed)} of {report.threshold} signatures"
    by = f" ({', '.join(report.signed)})" if report.signed else ""
    return f"{report.role} version {report.version}: {have}{by}; may still sign: {', '.join(report.waiting)}"


def _print_policy_diff(old: Path, bundle: BuiltBundle) -> int:
    new = bundle.files[bundle.manifest.policy.sha256]
    if not old.is_file():
        click.echo(f"    Not compared: the signed policy {old} is missing.")
        return 3
    before, after = (path.read_text(encoding="utf-8", errors="replace").splitlines() for path in (old, new))
    for line in difflib.unified_diff(before, after, "signed", str(new), lineterm="", n=1):
        click.echo(f"    {line}")
    return print_comparison(old, new)


@contextmanager
def readable_errors() -> Iterator[None]:
    """Print advice about a missing extra, and print expected errors without a traceback."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        raise click.ClickException(
            f"{error.name} is not installed. Run: pip install 'causeway-router[fleet]'"
        ) from error
    except (ConfigError, UpdateRefused) as error:
        raise click.ClickException(error.message) from error
    except OSError as error:
        raise click.ClickException(str(error)) from error
