"""The types that the operations of edge and gateway name (`operations.yaml`), and pages of files."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, defstruct, field

from ..anthropic.replies import FaultDocument, ModelInfo, ModelPage, TokenCount
from ..anthropic.wire import WireCountTokens, WireMessages
from ..jobs.job import WebhookSecrets
from ..jobs.webhooks import EndedJob, StandardPayload
from ..numbers import MAX_PAGE
from ..openai.answer import AnswerCall, AnswerCallDelta, AnswerToken, AnswerUsage, ModelList, ModelObject
from ..openai.completions import CompletionLogprobs
from ..openai.embeddings import EncodedVectors
from ..openai.responses.compaction import WireCompaction
from ..openai.responses.request import WireResponse
from ..openai.responses.state import NotEnded, StoredConversation, WireConversation, WireItems
from ..openai.tokens import DetokenizedText, TokenList, WireDetokenize, WireTokenize
from ..openai.wire import WireChat, WireCompletion, WireEmbedding
from ..types import Priority
from ..variants.feedback import Feedback, FeedbackReceipt


class FileView(Struct, frozen=True):
    """OpenAI's file object. Times are unix seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class FileList(Struct):
    """The body of `GET /v1/files`, the newest file first."""

    data: list[FileView]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class DeletedFile(Struct):
    id: str
    object: str = "file"
    deleted: bool = True


def list_page(files: list[FileView], limit: int, after: str = "", purpose: str = "") -> FileList:
    """Return a page of `files`, which come newest first. An unknown `after` begins at the newest."""
    found = [file for file in files if not purpose or file.purpose == purpose]
    ids = [file.id for file in found]
    rest = found[ids.index(after) + 1 if after in ids else 0 :]
    rows = rest[:limit]
    first, last = (rows[0].id, rows[-1].id) if rows else (None, None)
    return FileList(rows, len(rest) > limit, first, last)


def file_upload(purposes: Any) -> type[Struct]:
    """Return the form of an upload. `purposes`: the accepted ones, as a Literal."""
    return defstruct(
        "FileUpload",
        [
            ("file", Annotated[str, Meta(extra_json_schema={"contentMediaType": "application/octet-stream"})]),
            ("purpose", purposes),
            ("anchor", str, field(name="expires_after[anchor]", default="created_at")),
            ("seconds", Annotated[int, Meta(ge=1)], field(name="expires_after[seconds]", default=86_400)),
        ],
    )


def by_name(*types: type) -> dict[str, Any]:
    """Return types by their names."""
    return {one.__name__: one for one in types}


SHARED_TYPES: Final = {
    "ItemLimit": Annotated[int, Meta(ge=1, le=100)],
    "PageLimit": Annotated[int, Meta(ge=1, le=MAX_PAGE)],
    "DeadlineMs": Annotated[int, Meta(ge=1, le=999_999_999)],
    "Order": Literal["asc", "desc"],
    "Priority": Priority,
    **by_name(AnswerCall, AnswerCallDelta, AnswerToken, AnswerUsage, CompletionLogprobs, DeletedFile, DetokenizedText),
    **by_name(EncodedVectors, EndedJob, FaultDocument, Feedback, FeedbackReceipt, FileList, FileView),
    **by_name(ModelInfo, ModelList, ModelObject, ModelPage, NotEnded, StandardPayload, StoredConversation, TokenCount),
    **by_name(TokenList, WebhookSecrets, WireChat, WireCompaction, WireCompletion, WireConversation, WireCountTokens),
    **by_name(WireDetokenize, WireEmbedding, WireItems, WireMessages, WireResponse, WireTokenize),
}
"""The types that `operations.yaml` names."""
