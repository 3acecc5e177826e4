"""Parsing of a submitted body into a new job: an OpenAI request with our fields (`priority`, `deadline_ms`, …).

Our fields are removed before the request is stored, so that a plain OpenAI request is left. The uploaded files named in
a request are read first: their bytes replace their ids before the body is parsed any further.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping

import msgspec

from causeway_server.router.errors import InvalidRequest, NotFound, UnsupportedFeature
from causeway_server.router.jobs.submission import Endpoint, body_digest, key_digest, parse_job_request, split_body
from causeway_server.router.jobs.webhooks import allowed_networks, check_webhook_url
from causeway_server.router.parts.reading import text_bytes
from causeway_server.router.parts.uploads import PART_PURPOSES, Reference, Upload, is_file_id, named_files
from causeway_server.router.residency import Regions, check_region, check_webhook_region, region_tags, regions_of
from causeway_server.router.types import Request, RoutingHints, folded_tags

from ..accounts.ledger import BYTES_PER_TOKEN
from ..accounts.tenants.config import TenantLimits
from ..admission import Priority
from ..core.principal import Principal
from ..degradation.tier_sessions import TierSessions
from ..serving.service import check_parts, check_supported
from ..storage.config import JobsConfig
from ..storage.file_contents import FileContentLost
from ..storage.file_store import FileStore, StoredFile
from ..storage.record import NewJob, user_digest
from ..tiers.tier import AllowedTiers, Tier, allowed_tiers, encoders_of, find_tier, in_regions

CheckCost = Callable[[str, str, Request, int, int], int]
"""Returns the maximum cost of a request in 1e-12 USD, from tenant, tier, request, body bytes and the tier's token
limit.

Raises InvalidRequest if it exceeds the tenant's daily budget.
"""


class NamedFileReader:
    """Reads the files that bodies name. `region`: of this process; None: no file is read outside its regions."""

    def __init__(self, files: FileStore, region: str | None = None) -> None:
        self._files = files
        self._region = region

    async def inline(
        self, body: bytes, owner: str, max_bytes: int, hold: Callable[[int], None] = lambda _: None
    ) -> bytes:
        """Return a body with its files inlined; a body that names none is returned unchanged. Raises what `hold` does,
        too.

        Args:
            max_bytes: Maximum size of the body with its files in base64.
            hold: Function that counts memory for the body, in bytes.

        Raises:
            NotFound: `owner` has no such file; the error names the part.
            BodyTooLarge: The files are too large for one request.
            InvalidRequest: The body is malformed, or a file is the input of a batch or not an image.
            OutsideRegion: A file is bound to regions, and this process is in none of them.
            JobStoreUnavailable: The files cannot be read.
        """
        named = named_files(body)
        if named is None:
            return body
        files = {name: await self._find(reference, owner) for name, reference in named.first.items()}
        uploads = {name: Upload(name, file.filename, file.bytes) for name, file in files.items()}
        hold(named.check_size(uploads, len(body), max_bytes))
        contents = {name: await self._read(file, named.first[name]) for name, file in files.items()}
        named.restrict(RoutingHints(tags=tuple(tag for file in files.values() for tag in file.tags.split(",") if tag)))
        return named.inline(uploads, contents)

    async def _find(self, reference: Reference, owner: str) -> StoredFile:
        try:
            if not is_file_id(reference.id):
                raise NotFound(f"You have no file {reference.id[:80]!r}.")
            file = await self._files.get(reference.id, owner)
        except NotFound as error:
            message = f"`{reference.path}`: {error.message} It has expired, was deleted, or never existed."
            raise NotFound(message, param=reference.path) from None
        if file.purpose not in PART_PURPOSES:
            raise InvalidRequest(
                f"`{reference.path}`: the file {file.id} has the purpose {file.purpose}. A request can name only "
                "files with the purpose user_data.",
                param=reference.path,
            )
        return file

    async def _read(self, file: StoredFile, reference: Reference) -> bytes:
        if self._region is not None:
            check_region(regions_of(file.tags.split(",")), self._region, "this gateway (identity.region)")
        try:
            return b"".join([piece async for piece in self._files.read(file)])
        except FileContentLost:
            stored = await self._files.lookup(file.id)
            if stored is not None and stored.state == "ready":
                raise
            message = f"`{reference.path}`: {file.id} was deleted in the meantime."
            raise NotFound(message, param=reference.path) from None


def refuse_named_files(body: bytes) -> None:
    """Raise UnsupportedFeature for a body that names files, at endpoints that read none."""
    named = named_files(body)
    if named is not None:
        reference = named.references[0]
        raise UnsupportedFeature(
            f"`{reference.path}`: uploaded files can only be named in chat requests and jobs over HTTP. Send the "
            "bytes of the file in base64.",
            param=reference.path,
        )


class JobSubmission(msgspec.Struct, frozen=True, kw_only=True):
    """A body with the values of its headers."""

    principal: Principal
    body: bytes
    sent: bytes = b""  # the body as it was sent, with ids of uploaded files; empty if it names none
    priority: Priority = "standard"
    deadline_ms: int | None = None  # milliseconds until the deadline
    key: str = ""  # value of Idempotency-Key
    tags: tuple[str, ...] = ()
    endpoint: Endpoint | None = None  # endpoint of a plain request; None if the body names it


class SubmissionParser:
    """Parses and checks submissions for `tiers` (by name and alias), and puts them at their sessions' tiers."""

    def __init__(
        self,
        config: JobsConfig,
        tiers: Mapping[str, Tier],
        check_cost: CheckCost = lambda *_: 0,
        *,
        region: str = "",
        sessions: TierSessions | None = None,
    ) -> None:
        """Create the parser. Raises ConfigError for an invalid `jobs.webhooks.allowed_networks`."""
        self._config = config
        self._region = region
        self._sessions = sessions
        self._check_cost = check_cost
        self._tiers = tiers
        self._allowed = allowed_networks(config.webhooks.allowed_networks)

    async def parse(self, submission: JobSubmission, now_ms: int, limits: TenantLimits) -> NewJob:
        """Return the job. `now_ms`: Unix time.

        Raises:
            InvalidRequest: The body or one of our fields is invalid, or exceeds a limit of the tenant.
            ModelNotFound: There is no such tier.
            ModelNotAllowed: The caller may not use the tier.
            PermissionDenied: The caller may not send such content.
            OutsideRegion: The job is bound to regions, and a place that it needs is in none of them.
            SessionTargetUnavailable: The only tier that may answer the session cannot be that of the request.
            UnsupportedFeature: The tier lacks a requested feature.
            WebhookRefused: Webhooks may not be sent to this URL.
        """
        principal, sent = submission.principal, submission.sent or submission.body
        refuse_named_files(submission.body)
        extensions, body = split_body(submission.body)
        if submission.endpoint is not None:
            extensions = msgspec.structs.replace(extensions, endpoint=submission.endpoint)
        allowed = allowed_tiers(self._tiers, limits.models, principal.grants.models)
        hints = RoutingHints(client=principal.owner, tags=submission.tags)
        request = parse_job_request(extensions.endpoint, body, hints)
        request = await self.placed(request, principal.tenant, allowed)
        self.check(request, allowed)
        if submission.endpoint is not None and request.stream:
            message = "A job's answer cannot be streamed. Remove `stream` or `Prefer: respond-async`."
            raise InvalidRequest(message, param="stream")
        principal.grants.require_modalities(request)
        self.check_parts(request)
        limits.check_request(request)
        tier = self._tiers[request.model]
        regions = self.check_store(request.hints.tags, limits)
        check_region(regions, tier.config.region, f"the tier {tier.name} (tiers.region)")
        check_webhook_region(regions, extensions.webhook, self._config.webhooks.regions)
        body_bytes = text_bytes(request, len(body))
        self._check_cost(principal.tenant, tier.name, limits.bounded(request), body_bytes, tier.max_tokens)
        deadline_ms = submission.deadline_ms if extensions.deadline_ms is None else extensions.deadline_ms
        not_before_ms = extensions.not_before_ms
        time_ms = self._time_ms(deadline_ms, not_before_ms)
        if extensions.webhook:
            allow_http = self._config.webhooks.allow_http
            check_webhook_url(extensions.webhook, allow_http=allow_http, allowed=self._allowed)
        return NewJob(
            id=f"job_{secrets.token_hex(12)}",
            owner=principal.owner,
            tier=tier.name,
            token_id=principal.token_id,
            token_issued=principal.issued,
            priority=principal.grants.bounded_priority(extensions.priority or submission.priority),
            endpoint=extensions.endpoint,
            body=body,
            deadline_ms=now_ms + time_ms,
            not_before=now_ms + not_before_ms if not_before_ms else 0,
            tokens=self.tokens(request, body),
            webhook=extensions.webhook,
            idempotency=key_digest(submission.key),
            digest=submission_digest(submission.priority, submission.tags, submission.endpoint, sent),
            tags=folded_tags((*submission.tags, *region_tags(regions))),
            user=user_digest(principal.tenant, request.user or ""),
        )

    def check_store(self, tags: Iterable[str], limits: TenantLimits) -> Regions:
        """Return the regions that bind a job, batch or file. Raises OutsideRegion if process or store is in none."""
        regions = regions_of((*tags, *region_tags(limits.regions or None)))
        check_region(regions, self._region, "this gateway (identity.region)")
        check_region(regions, self._config.region, "the store of jobs and files (jobs.region)")
        return regions

    def check_parts(self, request: Request) -> None:
        """Raise UnsupportedFeature for audio, an image or a file that no tier reads, nor the request's own takes."""
        native = self._tiers[request.model].config.native_parts
        check_parts(request, (*encoders_of(self._tiers.values()), *native))

    def check(self, request: Request, allowed: AllowedTiers) -> None:
        """Check what would fail later. Raises InvalidRequest, ModelNotFound, ModelNotAllowed, UnsupportedFeature."""
        tier = find_tier(self._tiers, request.model, allowed)
        check_supported(request)
        tier.check_ability(request.kind)
        tier.check_sequences(request)

    async def placed(self, request: Request, tenant: str, allowed: AllowedTiers) -> Request:
        """Return a request with the tier that is to answer its session, and bound to the session's regions.

        Raises ModelNotFound, ModelNotAllowed or SessionTargetUnavailable.
        """
        if self._sessions is None:
            return request
        owner = request.hints.client
        await self._sessions.bind(request, tenant, owner)
        tier = find_tier(self._tiers, request.model, allowed).name
        turn = await self._sessions.find(request, tenant, owner, tier)
        if turn is None:
            return request
        request = turn.bound(request)
        allowed = in_regions(self._tiers, allowed, regions_of(request.hints.tags))
        if turn.pinned in ("", tier):
            return request
        if allowed is not None and turn.pinned not in allowed:
            if turn.only:
                raise turn.gone("This request may not use that tier.")
            return request
        return msgspec.structs.replace(request, model=turn.pinned)

    def tier_name(self, request: Request) -> str:
        """Return the name of the tier that the request's model stands for."""
        return self._tiers[request.model].name

    def tokens(self, request: Request, body: bytes) -> float:
        """Return the estimated number of tokens of a request before it is tokenised."""
        prompt_tokens = text_bytes(request, len(body)) / BYTES_PER_TOKEN
        if request.kind == "embedding":
            return prompt_tokens
        max_tokens = request.max_tokens or self._tiers[request.model].max_tokens
        return prompt_tokens + request.sequences * max_tokens

    def _time_ms(self, deadline_ms: int | None, not_before_ms: int) -> int:
        """Return the job's total time, including the time before it may start. Raises InvalidRequest."""
        longest_ms = int(self._config.max_deadline_s * 1000)
        bound_ms = longest_ms if deadline_ms is None else min(deadline_ms, longest_ms)
        if not_before_ms >= bound_ms:
            message = f"`not_before_ms` must be less than the deadline, which is in {bound_ms} ms"
            raise InvalidRequest(message, param="not_before_ms")
        if deadline_ms is None:
            deadline_ms = not_before_ms + int(self._config.default_deadline_s * 1000)
        return min(deadline_ms, longest_ms)


def submission_digest(priority: Priority, tags: tuple[str, ...], endpoint: Endpoint | None, sent: bytes) -> str:
    """Return the digest of everything that must be equal in requests with the same Idempotency-Key."""
    plain = (endpoint,) if endpoint is not None else ()
    return body_digest(",".join((priority, *tags, *plain)), sent)
