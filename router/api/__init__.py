"""HTTP APIs as values, and the OpenAPI documents that are made from them. Pure.

operation     one operation: method, path, parameters, bodies and errors
document      operations → the document
answers       the bodies of OpenAI's answers, as `router.openai` writes them
generation    OpenAI's operations, which the edge and the gateway have in common
audio         transcriptions, which both have
webhooks      those of jobs, which both have
"""

from .document import OPENAPI_PATH, ErrorDocument, openapi_document
from .operation import EVENTS, FORM, JSON, TEXT, AnyOf, ApiResponse, Operation, Parameter

__all__ = [
    "EVENTS",
    "FORM",
    "JSON",
    "OPENAPI_PATH",
    "TEXT",
    "AnyOf",
    "ApiResponse",
    "ErrorDocument",
    "Operation",
    "Parameter",
    "openapi_document",
]
