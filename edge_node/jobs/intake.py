"""Acceptance of jobs, whichever way they come in: checked, decided once, and stored before they are acknowledged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from router.decision.abilities import no_route
from router.errors import InvalidRequest, NotFound, UnsupportedFeature
from router.jobs.submission import Endpoint, JobFields, Priority, body_digest, parse_job_request, split_body
from router.jobs.webhooks.address import allowed_networks, check_webhook_url
from router.openai.error_body import replace_surrogates
from router.parts.uploads import FILE_MARK, named_files
from router.policy.signals import modalities
from router.types import RoutingHints

from ..config.schema import OutboxConfig
from ..serving.service import Service
from .record import Accepted, EdgeJob, ReplyTo
from .running.runner import OutboxRunner
from .store import JobOutbox

WithFiles = Callable[[bytes, str], Awaitable[bytes]]
"""A body and its client → the body with the client's uploaded files. Raises NotFound for one that is gone."""


class JobKey(msgspec.Struct, frozen=True):
    """What makes two requests of a client the same job.

    `digest`: of everything that must be the same under the same key; "": of body, tags, preference and priority.
    """

    key: str = ""
    digest: str = ""


class EdgeJobFields(JobFields, frozen=True):
    """Those of a job's body that mean something to a device, and one that does not."""

    window: Any = None


class JobIntake:
    """Accepts jobs.

    Args:
        with_files: puts the uploaded files of a client in place of their ids, in a body.
    """

    def __init__(
        self, config: OutboxConfig, store: JobOutbox, runner: OutboxRunner, service: Service, with_files: WithFiles
    ) -> None:
        """Raises ConfigError for invalid `jobs.webhooks.allowed_networks`."""
        self._with_files = with_files
        self._config = config
        self._networks = allowed_networks(config.webhooks.allowed_networks)
        self._store = store
        self._runner = runner
        self._service = service

    async def accept(
        self,
        body: bytes,
        hints: RoutingHints,
        priority: Priority | None,
        key: JobKey,
        endpoint: Endpoint | None = None,
        *,
        reply: ReplyTo | None = None,
    ) -> Accepted:
        """Check a job and store it; what returns survives a power cut.

        Args:
            body: an OpenAI request, with the fields of a job.
            hints: of the client.
            priority: if the body names none.
            key: under which it is known when it comes again.
            endpoint: of a plain request, which may not be streamed; None: the body names it.
            reply: where the answer is sent; None: it is fetched.

        Raises:
            CausewayError: what is wrong with the job, or why there is no room for it.
        """
        whole = await self._whole(body, hints, key, is_message=reply is not None) if FILE_MARK in body else body
        job, plain = await self._job(body, whole, hints, priority, key, endpoint)
        try:
            return await self._store.accept(job, plain, reply)
        finally:  # also where the caller left during the commit: the job is there
            self._runner.wake()

    async def _whole(self, body: bytes, hints: RoutingHints, key: JobKey, *, is_message: bool) -> bytes:
        """Put the bytes of uploaded files into a body: an accepted job needs them no more, and they may go.

        One that comes again under its key is known even if its files are gone.
        """
        if is_message and named_files(body) is not None:
            raise UnsupportedFeature("messages name no uploaded files: send the bytes as a data: URL in base64")
        try:
            return await self._with_files(body, hints.client)
        except NotFound:
            if await self._store.known(hints.client, key.key) is None:
                raise
            return body

    async def _job(
        self,
        body: bytes,
        whole: bytes,
        hints: RoutingHints,
        priority: Priority | None,
        key: JobKey,
        endpoint: Endpoint | None,
    ) -> tuple[EdgeJob, bytes]:
        """The checked job, and its request. Raises InvalidRequest, ModelNotFound, UnsupportedFeature or NoRoute.

        Args:
            whole: the body with its uploaded files.
        """
        fields, plain = split_body(whole, EdgeJobFields)
        if endpoint is not None:
            fields = msgspec.structs.replace(fields, endpoint=endpoint)
        if fields.window is not None:
            message = "a device has no off-peak hours: leave `window` out, or send `not_before_ms`"
            raise UnsupportedFeature(message, param="window")
        if fields.webhook:
            webhooks = self._config.webhooks
            check_webhook_url(fields.webhook, allow_http=webhooks.allow_http, allowed=self._networks)
        request = parse_job_request(fields.endpoint, plain, hints)
        if modalities(request) != ["text"] and not self._config.accept_parts:
            message = (
                "this box keeps no sound, pictures or files on its disk, where jobs wait (`jobs.accept_parts`): "
                "send it as a plain request"
            )
            raise UnsupportedFeature(message, param="messages")
        if endpoint is not None and request.stream:
            message = "an answer is streamed, or becomes a job: leave out `stream` or `Prefer: respond-async`"
            raise InvalidRequest(message, param="stream")
        decision = await self._service.preview(request)
        if not decision.attempts:
            raise no_route(decision)
        now = self._store.time.now()
        time_ms = fields.deadline_ms or request.hints.deadline_ms or int(self._config.default_deadline_s * 1000.0)
        if time_ms <= fields.not_before_ms:
            message = f"`not_before_ms` must be less than the deadline, which is in {time_ms} ms"
            raise InvalidRequest(message, param="not_before_ms")
        ranked = fields.priority or priority or "standard"
        job = EdgeJob(
            owner=hints.client,
            key=key.key,
            digest=(key.digest or _digest(body, hints, ranked)) if key.key else "",
            priority=ranked,
            endpoint=fields.endpoint,
            model=request.model,
            tags=tuple(replace_surrogates(tag) for tag in hints.tags),  # as signals have them
            prefer=hints.prefer,
            may_leave=not decision.on_device,
            lane=decision.attempts[0].target.at,
            due=now + fields.not_before_ms / 1000.0,
            deadline=now + min(time_ms / 1000.0, self._config.max_deadline_s),
            accepted_unix=self._store.time.unix(),
            webhook=fields.webhook,
            revise_within_s=min(fields.revise_within_ms / 1000.0, self._config.max_revise_s),
        )
        return job, plain


def _digest(body: bytes, hints: RoutingHints, priority: Priority) -> str:
    return body_digest(",".join((priority, hints.prefer or "", *hints.tags)), body)
