"""What OpenAI-compatible servers really send, and what a client of ours is to get: of the edge and of the gateway."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import msgspec

from .edge_node.device import Answer
from .edge_node.raw_upstream import call, delta, document, events, reply, whole

BOM = b"\xef\xbb\xbf"
HI = (delta("h"), delta("i"), delta(finish="stop"))
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "lookup")
]
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
OSLO = '{"city":"Oslo"}'


class Read(msgspec.Struct, frozen=True):
    """What a client gets. `calls`: names and arguments; `note`: in the decision's record."""

    text: str = "hi"
    finish: str = "stop"
    thought: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    note: str = ""


SAME = Read()
STREAMS: dict[str, tuple[bytes, Read]] = {
    # --- framing
    "openai": (events(delta("", role="assistant"), *HI), SAME),
    "no done": (events(*HI, end=b""), SAME),
    "done without a space": (events(*HI, end=b"data:[DONE]\n\n"), SAME),
    "done with spaces": (events(*HI, end=b"data:  [DONE] \n\n"), SAME),
    "done twice": (events(*HI, end=b"data: [DONE]\n\ndata: [DONE]\n\n"), SAME),
    "done without an empty line": (events(*HI, end=b"data: [DONE]\n"), SAME),
    "an empty data line": (events(b"data:\n\n", *HI), SAME),
    "an empty data line in the middle": (events(HI[0], b"data: \n\n", *HI[1:]), SAME),
    "comments": (events(b": ping\n\n", HI[0], b": OPENROUTER PROCESSING\n\n", *HI[1:]), SAME),
    "a retry field": (events(b"retry: 3000\n\n", *HI), SAME),
    "event and id fields": (events(b"event: message\nid: 1\n", *HI), SAME),
    "crlf": (
        reply(events(*HI).partition(b"\r\n\r\n")[2].replace(b"\n", b"\r\n"), media_type="text/event-stream"),
        SAME,
    ),
    "cr": (reply(events(*HI).partition(b"\r\n\r\n")[2].replace(b"\n", b"\r"), media_type="text/event-stream"), SAME),
    "no space after data": (
        reply(events(*HI).partition(b"\r\n\r\n")[2].replace(b"data: ", b"data:"), media_type="text/event-stream"),
        SAME,
    ),
    "a byte order mark": (events(BOM, *HI), SAME),
    "a byte order mark in an event": (events(b"data: " + BOM + json.dumps(HI[0]).encode() + b"\n\n", *HI[1:]), SAME),
    "bytes after done": (events(*HI, end=b"data: [DONE]\n\ndata: {nonsense\n\n"), SAME),
    "events of one line each": (events(b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in HI)), SAME),
    "pretty printed": (
        events(
            *(
                b"".join(b"data: " + line + b"\n" for line in json.dumps(e, indent=1).encode().splitlines()) + b"\n"
                for e in HI
            )
        ),
        SAME,
    ),
    "charset in the type": (events(*HI, media_type="text/event-stream; charset=utf-8"), SAME),
    "a stream said to be plain text": (events(*HI, media_type="text/plain"), SAME),
    "a stream said to be json": (events(*HI, media_type="application/json"), SAME),
    "json in the place of a stream": (document(whole()), SAME),
    "json after blank lines": (reply(b"\n\n" + json.dumps(whole()).encode()), SAME),
    "json said to be a stream": (document(whole(), media_type="text/event-stream"), SAME),
    "json with a usage in the place of a stream": (document(whole() | {"usage": USAGE}), SAME),
    "gzip in spite of identity": (
        reply(
            gzip.compress(b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in HI) + b"data: [DONE]\n\n"),
            media_type="text/event-stream",
            headers=("Content-Encoding: gzip",),
        ),
        SAME,
    ),
    "gzipped json in the place of a stream": (
        reply(gzip.compress(json.dumps(whole()).encode()), headers=("Content-Encoding: gzip",)),
        SAME,
    ),
    # --- choices
    "choices are empty first": (events({"choices": [], "prompt_filter_results": []}, *HI), SAME),
    "choices are null": (events({"choices": None}, *HI), SAME),
    "no choices in an event": (events({"id": "x", "model": "m"}, *HI), SAME),
    "no index": (
        events(
            *({"choices": [{"delta": {"content": t}}]} for t in "hi"),
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        ),
        SAME,
    ),
    "index null": (events({"choices": [{"index": None, "delta": {"content": "hi"}, "finish_reason": "stop"}]}), SAME),
    "index as text": (events({"choices": [{"index": "0", "delta": {"content": "hi"}, "finish_reason": "stop"}]}), SAME),
    "delta null at the end": (
        events(HI[0], HI[1], {"choices": [{"index": 0, "delta": None, "finish_reason": "stop"}]}),
        SAME,
    ),
    "no delta at the end": (events(HI[0], HI[1], {"choices": [{"index": 0, "finish_reason": "stop"}]}), SAME),
    "a message in the place of a delta": (
        events({"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}),
        SAME,
    ),
    "role with each piece": (events(*(delta(t, role="assistant") for t in "hi"), HI[2]), SAME),
    "role null": (events(delta("h", role=None), *HI[1:]), SAME),
    "content null first": (events(delta(role="assistant", content=None), *HI), SAME),
    "unknown fields everywhere": (events(*({**e, "x": {"y": 1}, "system_fingerprint": None} for e in HI)), SAME),
    "a keep-alive event of another kind": (events({"type": "ping"}, *HI), SAME),
    "everything in one event": (events(delta("hi", "stop")), SAME),
    # --- content
    "content as a list": (events(delta([{"type": "text", "text": "hi"}]), HI[2]), SAME),
    "content as two parts": (
        events(delta([{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]), HI[2]),
        SAME,
    ),
    "content as a part": (events(delta({"type": "text", "text": "hi"}), HI[2]), SAME),
    "content as output_text": (events(delta([{"type": "output_text", "text": "hi"}]), HI[2]), SAME),
    "content as a list of strings": (events(delta(["h", "i"]), HI[2]), SAME),
    "an empty list first": (events(delta([]), *HI), SAME),
    "reasoning_content": (events(delta(reasoning_content="hm"), *HI), Read(thought="hm")),
    "reasoning": (events(delta(reasoning="hm"), *HI), Read(thought="hm")),
    "reasoning beside content": (events(delta("h", reasoning="hm"), *HI[1:]), Read(thought="hm")),
    "a thinking part": (
        events(
            delta([{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "hi"}]),
            HI[2],
        ),
        Read(thought="hm"),
    ),
    "a thinking part of text": (events(delta([{"type": "thinking", "thinking": "hm"}]), *HI), Read(thought="hm")),
    "reasoning as an object": (events(delta(reasoning={"effort": "low"}), *HI), SAME),
    # --- usage
    "usage with the end": (events(HI[0], HI[1], {**HI[2], "usage": USAGE}), SAME),
    "usage with every event": (events(*({**e, "usage": USAGE} for e in HI)), SAME),
    "usage null": (events(*({**e, "usage": None} for e in HI)), SAME),
    "usage after the end": (events(*HI, {"choices": [], "usage": USAGE}), SAME),
    "usage as text": (events(*HI, {"choices": [], "usage": {k: str(v) for k, v in USAGE.items()}}), SAME),
    "usage as fractions": (events(*HI, {"choices": [], "usage": {k: float(v) for k, v in USAGE.items()}}), SAME),
    "usage in parts": (events(*HI, {"choices": [], "usage": {"prompt_tokens": 7}}), SAME),
    "usage is a list": (events(*HI, {"choices": [], "usage": [USAGE]}), SAME),
    "usage without choices": (events(*HI, {"usage": USAGE}), SAME),
    # --- the end
    **{
        f"finish_reason {reason}": (events(HI[0], HI[1], delta(finish=reason)), Read(finish=read))
        for reason, read in (
            *(
                ("STOP", "stop"),
                ("eos", "stop"),
                ("eos_token", "stop"),
                ("end_turn", "stop"),
                ("stop_sequence", "stop"),
            ),
            *(("COMPLETE", "stop"), ("FINISH_REASON_STOP", "stop")),
            *(("length", "length"), ("model_length", "length"), ("MAX_TOKENS", "length"), ("max_tokens", "length")),
            *(("SAFETY", "content_filter"), ("RECITATION", "content_filter"), ("content_filter", "content_filter")),
            *(("PROHIBITED_CONTENT", "content_filter"), ("refusal", "content_filter"), ("BLOCKLIST", "content_filter")),
        )
    },
    "finish_reason unknown": (events(HI[0], HI[1], delta(finish="exotic")), Read(note="exotic")),
    "finish_reason as text null": (events(delta("h", "null"), delta("i", "null"), HI[2]), SAME),
    "finish_reason empty": (events(delta("h", ""), delta("i", ""), HI[2]), SAME),
    "finish_reason is a number": (events(delta("h", 0), delta("i", 0), HI[2]), SAME),
    "stop with every piece": (events(delta("h", "stop"), delta("i", "stop")), SAME),
    "the end twice": (events(*HI, HI[2]), SAME),
    "the end and then another": (events(HI[0], HI[1], delta(finish="length"), HI[2]), SAME),
    "no end but done": (events(HI[0], HI[1]), SAME),
    "a role after the end": (events(*HI, delta(role="assistant")), SAME),
    # --- tool calls
    "calls": (
        events(
            delta(tool_calls=[call("weather", "", index=0, id="a")]),
            delta(tool_calls=[call(None, OSLO, index=0)]),
            delta(finish="tool_calls"),
        ),
        Read("", "tool_calls", calls=(("weather", OSLO),)),
    ),
    "two calls at index 0": (
        events(
            delta(tool_calls=[call("weather", OSLO, index=0, id="a")]),
            delta(tool_calls=[call("lookup", "{}", index=0, id="b")]),
            delta(finish="tool_calls"),
        ),
        Read("", "tool_calls", calls=(("weather", OSLO), ("lookup", "{}"))),
    ),
    "two calls of one name at index 0": (
        events(
            delta(tool_calls=[call("weather", OSLO, index=0, id="a")]),
            delta(tool_calls=[call("weather", "{}", index=0, id="b")]),
            delta(finish="tool_calls"),
        ),
        Read("", "tool_calls", calls=(("weather", OSLO), ("weather", "{}"))),
    ),
    "two calls at index 0 without ids": (
        events(
            delta(tool_calls=[call("weather", OSLO, index=0)]),
            delta(tool_calls=[call("weather", "{}", index=0)]),
            delta(finish="tool_calls"),
        ),
        Read("", "tool_calls", calls=(("weather", OSLO), ("weather", "{}"))),
    ),
    "two calls without an index": (
        events(
            delta(tool_calls=[call("weather", OSLO, id="a"), call("lookup", "{}", id="b")]), delta(finish="tool_calls")
        ),
        Read("", "tool_calls", calls=(("weather", OSLO), ("lookup", "{}"))),
    ),
    "calls without index and id": (
        events(
            delta(tool_calls=[call("weather", OSLO)]),
            delta(tool_calls=[call("lookup", "{}")]),
            delta(finish="tool_calls"),
        ),
        Read("", "tool_calls", calls=(("weather", OSLO), ("lookup", "{}"))),
    ),
    "pieces without an index": (
        events(
            delta(tool_calls=[call("weather", '{"city"', id="a")]),
            delta(tool_calls=[call(None, ':"Oslo"}')]),
            delta(finish="tool_calls"),
        ),
        Read("", "tool_calls", calls=(("weather", OSLO),)),
    ),
    "the id with each piece": (
        events(
            *(delta(tool_calls=[call(None, part, index=0, id="a")]) for part in (OSLO[:8], OSLO[8:])),
            delta(finish="tool_calls"),
        ).replace(b'"arguments": "{', b'"name": "weather", "arguments": "{', 1),
        Read("", "tool_calls", calls=(("weather", OSLO),)),
    ),
    "the name with each piece": (
        events(
            *(delta(tool_calls=[call("weather", part, index=0)]) for part in (OSLO[:8], OSLO[8:])),
            delta(finish="tool_calls"),
        ),
        Read("", "tool_calls", calls=(("weather", OSLO),)),
    ),
    "pieces of two calls by turns at index 0": (
        events(
            delta(tool_calls=[call("weather", OSLO[:8], index=0, id="a")]),
            delta(tool_calls=[call("lookup", "{", index=0, id="b")]),
            delta(tool_calls=[call(None, OSLO[8:], index=0, id="a")]),
            delta(tool_calls=[call(None, "}", index=0, id="b")]),
            delta(finish="tool_calls"),
        ),
        Read("", "tool_calls", calls=(("weather", OSLO), ("lookup", "{}"))),
    ),
    "arguments as an object": (
        events(delta(tool_calls=[call("weather", {"city": "Oslo"}, index=0, id="a")]), delta(finish="tool_calls")),
        Read("", "tool_calls", calls=(("weather", OSLO),)),
    ),
    "arguments null first": (
        events(
            delta(
                tool_calls=[{**call("weather", index=0, id="a"), "function": {"name": "weather", "arguments": None}}]
            ),
            delta(tool_calls=[call(None, OSLO, index=0)]),
            delta(finish="tool_calls"),
        ),
        Read("", "tool_calls", calls=(("weather", OSLO),)),
    ),
    "one id for two calls": (
        events(
            delta(tool_calls=[call("weather", OSLO, index=0, id="a"), call("lookup", "{}", index=1, id="a")]),
            delta(finish="tool_calls"),
        ),
        Read("", "tool_calls", calls=(("weather", OSLO), ("lookup", "{}"))),
    ),
    "an empty id": (
        events(delta(tool_calls=[call("weather", OSLO, index=0, id="")]), delta(finish="tool_calls")),
        Read("", "tool_calls", calls=(("weather", OSLO),)),
    ),
    "calls from index 1": (
        events(delta(tool_calls=[call("weather", OSLO, index=1, id="a")]), delta(finish="tool_calls")),
        Read("", "tool_calls", calls=(("weather", OSLO),)),
    ),
    "tool_calls, then stop": (
        events(
            delta(tool_calls=[call("weather", OSLO, index=0, id="a")]), delta(finish="tool_calls"), delta(finish="stop")
        ),
        Read("", "tool_calls", calls=(("weather", OSLO),)),
    ),
    "stop where there are calls": (
        events(delta(tool_calls=[call("weather", OSLO, index=0, id="a")]), delta(finish="stop")),
        Read("", "tool_calls", calls=(("weather", OSLO),)),
    ),
    "function_call as the end": (
        events(delta(tool_calls=[call("weather", OSLO, index=0, id="a")]), delta(finish="function_call")),
        Read("", "tool_calls", calls=(("weather", OSLO),)),
    ),
    "text before a call": (
        events(HI[0], HI[1], delta(tool_calls=[call("weather", OSLO, index=0, id="a")]), delta(finish="tool_calls")),
        Read("hi", "tool_calls", calls=(("weather", OSLO),)),
    ),
    "an empty list of calls": (events(delta("h", tool_calls=[]), *HI[1:]), SAME),
    "calls null": (events(delta("h", tool_calls=None), *HI[1:]), SAME),
    "logprobs in another form": (
        events(
            {
                "choices": [
                    {"index": 0, "delta": {"content": "hi"}, "logprobs": {"content": "x"}, "finish_reason": "stop"}
                ]
            }
        ),
        SAME,
    ),
}
WHOLES: dict[str, tuple[bytes, Read]] = {
    "openai": (document(whole()), SAME),
    "a byte order mark": (reply(BOM + json.dumps(whole()).encode()), SAME),
    "said to be text": (document(whole(), media_type="text/plain"), SAME),
    "said to be html": (document(whole(), media_type="text/html; charset=utf-8"), SAME),
    "blank lines before it": (reply(b"\n\n  " + json.dumps(whole()).encode()), SAME),
    "a stream in its place": (events(*HI), SAME),
    "a stream without done in its place": (events(*HI, end=b""), SAME),
    "gzip": (reply(gzip.compress(json.dumps(whole()).encode()), headers=("Content-Encoding: gzip",)), SAME),
    "deflate": (reply(zlib.compress(json.dumps(whole()).encode()), headers=("Content-Encoding: deflate",)), SAME),
    "content as a list": (document(whole([{"type": "text", "text": "hi"}])), SAME),
    "content as a list with an image": (
        document(whole([{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "hi"}])),
        SAME,
    ),
    "a thinking part": (
        document(whole([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "hi"}])),
        Read(thought="hm"),
    ),
    "reasoning_content": (document(whole(reasoning_content="hm")), Read(thought="hm")),
    "finish_reason null": (document(whole(finish=None)), SAME),
    "finish_reason MAX_TOKENS": (document(whole(finish="MAX_TOKENS")), Read(finish="length")),
    "finish_reason SAFETY": (document(whole(finish="SAFETY")), Read(finish="content_filter")),
    "finish_reason unknown": (document(whole(finish="exotic")), Read(note="exotic")),
    "usage as text": (document(whole() | {"usage": {k: str(v) for k, v in USAGE.items()}}), SAME),
    "usage null": (document(whole() | {"usage": None}), SAME),
    "no index": (document({"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}), SAME),
    "a delta in the place of a message": (
        document({"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]}),
        SAME,
    ),
    "logprobs in another form": (
        document({"choices": [{"index": 0, "message": {"content": "hi"}, "logprobs": [], "finish_reason": "stop"}]}),
        SAME,
    ),
    "calls with arguments as an object": (
        document(whole(None, "tool_calls", tool_calls=[call("weather", {"city": "Oslo"}, id="a")])),
        Read("", "tool_calls", calls=(("weather", OSLO),)),
    ),
    "calls without ids": (
        document(whole(None, "tool_calls", tool_calls=[call("weather", OSLO), call("lookup", "{}")])),
        Read("", "tool_calls", calls=(("weather", OSLO), ("lookup", "{}"))),
    ),
    "stop where there are calls": (
        document(whole(None, "stop", tool_calls=[call("weather", OSLO, id="a")])),
        Read("", "tool_calls", calls=(("weather", OSLO),)),
    ),
    "one call in the former field": (
        document(whole(None, "function_call", function_call={"name": "weather", "arguments": OSLO})),
        Read("", "tool_calls", calls=(("weather", OSLO),)),
    ),
}


def message_of(answer: Answer) -> dict[str, Any]:
    """Return the message, put together from a stream's events as clients do, with its finish reason."""
    if not answer.headers["Content-Type"].startswith("text/event-stream"):
        choice = answer.json["choices"][0]
        return {**choice["message"], "finish": [choice["finish_reason"]]}
    assert answer.done
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish": []}
    for event in answer.events:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for piece in delta.get("tool_calls") or ():
                if piece["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append(
                        {"id": piece["id"], "function": {"name": piece["function"]["name"], "arguments": ""}}
                    )
                function = message["tool_calls"][piece["index"]]["function"]
                function["arguments"] += piece["function"].get("arguments") or ""
            message["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return message


def read_of(answer: Answer, note: str = "") -> Read:
    """Return what a client gets. `note`: in the decision's record."""
    message = message_of(answer)
    calls = message.get("tool_calls") or []
    assert len(message["finish"]) == 1
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["id"] for call in calls)
    return Read(
        message.get("content") or "",
        message["finish"][-1],
        message.get("reasoning_content") or "",
        tuple((call["function"]["name"], call["function"]["arguments"]) for call in calls),
        note,
    )


# --- refusals and what cannot be read ---------------------------------------------------------------------------------

REASON = "the reason of the vendor"
REFUSALS = {
    # status line, body → the client's status and code, and whether it reads the vendor's reason
    "400 Bad Request": (400, "invalid_value", True),
    "401 Unauthorized": (502, "cloud_rejected", False),
    "402 Payment Required": (402, "cloud_payment_required", True),
    "403 Forbidden": (502, "cloud_rejected", False),
    "404 Not Found": (404, "cloud_not_found", True),
    "407 Proxy Authentication Required": (502, "cloud_rejected", False),
    "413 Content Too Large": (413, "cloud_body_too_large", True),
    "422 Unprocessable Content": (422, "cloud_unprocessable", True),
    "451 Unavailable For Legal Reasons": (451, "cloud_unavailable_for_legal_reasons", True),
    "418 I'm a teapot": (502, "cloud_rejected", False),
}
ERRORS = {
    "openai": {"error": {"message": REASON, "type": "x", "param": None, "code": "x"}},
    "vllm": {"object": "error", "message": REASON, "code": 400},
    "a text": {"error": REASON},
    "fastapi": {"detail": REASON},
    "fastapi with faults": {"detail": [{"loc": ["body", "model"], "msg": REASON, "input": "the prompt"}]},
}
UNREADABLE = {
    "html": reply(b"<html>Sign in</html>", media_type="text/html"),
    "nothing": reply(b""),
    "an array": reply(b"[]"),
    "null": reply(b"null"),
    "no choices": document({"id": "x"}),
    "empty choices": document({"choices": []}),
    "choices of texts": document({"choices": ["hi"]}),
    "content of a number": document(whole(5)),
    "cut json": reply(json.dumps(whole()).encode()[:40]),
    "not utf-8": reply(b'{"choices":[{"message":{"content":"\xff"}}]}'),
}
UNREADABLE_STREAMS = {
    "html": reply(b"<html>Sign in</html>", media_type="text/event-stream"),
    "nothing but done": events(),
    "a broken event": events(b"data: {nonsense\n\n"),
    "an event that is an array": events([1]),
    "an event whose content is a number": events(delta(5)),
    "json without choices": document({"id": "x"}),
}
