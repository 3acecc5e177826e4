"""From bytes to a JSON object, or to an error that says what is wrong, where, and what to do.

Nothing but `InvalidRequest` and its subclasses leaves this module, whatever the bytes are.
"""

from __future__ import annotations

import json
import re
from typing import TypeVar

import msgspec

from ..errors import InvalidJSON, InvalidRequest, MissingField, UnknownField

JSONObject = dict[str, object]
T = TypeVar("T")

_DECODER = msgspec.json.Decoder()
_ENCODER = msgspec.json.Encoder()

# msgspec says "<reason> - at `$.messages[0].content`", or "- at `key` in `$.logit_bias`" when a mapping's key is wrong.
_VALIDATION = re.compile(r"^(?P<reason>.*?)(?: - at (?:`key` in )?`\$(?P<path>.*)`)?$", re.DOTALL)
_FIELD = re.compile(r"^Object (?P<fault>missing required|contains unknown) field `(?P<name>.*)`$")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")

_HINTS = {
    "model": "Send a model's name, or `auto` to let the policy choose.",
    "messages": "Send a list with at least one message.",
    "role": "Use system, developer, user, assistant, tool or function.",
    "content": "Send a string or a non-empty list of content parts.",
    "type": "Content parts are text, image_url, input_audio, file or refusal; tools are of type function.",
    "prompt": "Send a string, a list of strings, a list of token ids, or a list of such lists.",
    "input": "Send a string, a list of strings, a list of token ids, or a list of such lists.",
    "temperature": "Send a number from 0 to 2.",
    "top_p": "Send a number from 0 to 1.",
    "min_p": "Send a number from 0 to 1.",
    "top_k": "Send a whole number; -1 or 0 means no limit.",
    "presence_penalty": "Send a number from -2 to 2.",
    "frequency_penalty": "Send a number from -2 to 2.",
    "n": "Send a whole number from 1 to 16.",
    "max_tokens": "Send a whole number of at least 1.",
    "max_completion_tokens": "Send a whole number of at least 1.",
    "top_logprobs": "Send a whole number from 0 to 20, with `logprobs` true.",
    "logprobs": "Chat takes true or false; completions take a whole number from 0 to 20.",
    "stop": "Send a string or a list of up to 16 strings, none of them empty.",
    "seed": "Send a whole number of 64 bits.",
    "logit_bias": "Send an object of token ids and numbers from -100 to 100.",
    "stream": "Send true or false.",
    "tool_choice": "Send none, auto, required, or an object that names one function.",
    "prefer": "Use prefer_on_device, only_on_device, prefer_cloud or only_cloud.",
    "tags": "Send a list of up to 32 short strings.",
    "deadline_ms": "Send the time left as a whole number of milliseconds, at least 1.",
    "encoding_format": "Use float or base64.",
}


def load(body: bytes) -> JSONObject:
    """The body as a JSON object. Raises InvalidJSON, or InvalidRequest where it is JSON but not an object."""
    if not body.strip():
        raise InvalidJSON("The body is empty. Send a JSON object.")
    try:
        document = _DECODER.decode(body)
        if type(document) is not dict:
            raise InvalidRequest(f"The body is {kind_of(document)}. Send a JSON object.")
        _refuse_repeated_keys(body, document)
    except RecursionError:
        raise InvalidJSON("The body is nested too deeply. Send fewer levels of arrays and objects.") from None
    except UnicodeDecodeError as error:
        raise InvalidJSON(f"The body is not UTF-8: {error.reason}. Send JSON encoded as UTF-8.") from None
    except ValueError as error:  # msgspec's, or the standard library's where it is stricter
        raise InvalidJSON(f"The body is not valid JSON: {error}{_surrogate_hint(body)}. Send a JSON object.") from None
    return document


def shape(document: JSONObject, into: type[T]) -> T:
    """The document as the typed struct `into`. Raises InvalidRequest with `param` as OpenAI writes it."""
    try:
        return msgspec.convert(document, into, str_keys=True)
    except msgspec.ValidationError as error:
        raise _translated(str(error), document) from None


def canonical(value: object, *, sort: bool = False) -> str:
    """Compact JSON text. The order of keys is kept unless `sort`: in a schema it is the order a model answers in."""
    return msgspec.json.encode(value, order="sorted" if sort else None).decode()


def kind_of(value: object) -> str:
    """A value's JSON type in words; never its content, which may be private."""
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)[:32]
    return "a string" if isinstance(value, str) else "an array" if isinstance(value, list) else "an object"


def _refuse_repeated_keys(body: bytes, document: JSONObject) -> None:
    # A repeated key is lost in decoding, so what we would write back is shorter than what came. Equal lengths, the
    # usual case, cost a microsecond; other spellings (1e2, \u00e9) also differ and take the exact look.
    if len(msgspec.json.format(body, indent=-1)) != len(_ENCODER.encode(document)):
        json.loads(body, object_pairs_hook=_unique, parse_int=len, parse_float=len)  # of numbers only that they are


def _unique(pairs: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise InvalidJSON(f"The key `{key[:64]}` appears twice in one object. Send it once.", param=key[:64])
        seen.add(key)


def _surrogate_hint(body: bytes) -> str:
    return " (or a \\ud800-\\udfff escape without its pair)" if b"\\ud" in body.lower() else ""


def _translated(text: str, document: JSONObject) -> InvalidRequest:
    match = _VALIDATION.match(text)
    reason, path = (match["reason"], match["path"] or "") if match else (text, "")
    path = path.removeprefix(".").replace("[...]", "")
    field = _FIELD.match(reason)
    if field is not None:
        return _field_fault(field["fault"], f"{path}.{field['name']}" if path else field["name"])
    leaf = _STEP.findall(path)
    hint = _HINTS.get(next((name for _, name in reversed(leaf) if name), ""), "")
    got = "" if "got" in reason else f", got {_found(document, path)}"
    return InvalidRequest(f"`{path}`: {reason[:1].lower()}{reason[1:200]}{got}. {hint}".rstrip(), param=path or None)


def _field_fault(fault: str, path: str) -> InvalidRequest:
    hint = _HINTS.get(path.rpartition(".")[2], "")
    if fault == "missing required":
        return MissingField(f"`{path}` is missing. {hint or 'Send it.'}", param=path)
    return UnknownField(f"`{path}` is not a field that we know. Remove it or mend its name.", param=path)


def _found(document: JSONObject, path: str) -> str:
    value: object = document
    for index, name in _STEP.findall(path):
        if isinstance(value, list) and index and int(index) < len(value):
            value = value[int(index)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            return "another value"
    return kind_of(value)
