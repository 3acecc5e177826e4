"""Try a model through the official client: every kind of request once, with what came back.

    python -m tests.bench.try_model http://127.0.0.1:8080/v1 small large

Needs a running edge or gateway; the models are names that it lists. Prints one row per model and request: what came
back, or the error. Rows are about the form; whether an answer is right is the model's affair.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import openai
from openai import OpenAI

from tests.tool import run_tool

WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TIMER = {
    "name": "set_timer",
    "description": "Set a timer",
    "parameters": {
        "type": "object",
        "properties": {"minutes": {"type": "integer"}},
        "required": ["minutes"],
        "additionalProperties": False,
    },
}
TOOLS: Any = [{"type": "function", "function": function} for function in (WEATHER, TIMER)]
RESPONSE_TOOLS: Any = [{"type": "function", "strict": True, **function} for function in (WEATHER, TIMER)]
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
Try = Callable[[OpenAI, str], str]


def chat(client: OpenAI, model: str, text: str, **fields: Any) -> Any:
    create: Any = client.chat.completions.create
    messages = [{"role": "user", "content": text}]
    return create(**{"model": model, "messages": messages, "temperature": 0, "max_tokens": 120} | fields)


def calls_of(answer: Any) -> str:
    calls = [
        (call.function.name, json.loads(call.function.arguments)) for call in answer.choices[0].message.tool_calls or ()
    ]
    return str(calls) if calls else f"no call: {answer.choices[0].message.content!r}"


def models(client: OpenAI, model: str) -> str:
    return str(model in [listed.id for listed in client.models.list()])


def plain_chat(client: OpenAI, model: str) -> str:
    return repr(chat(client, model, "What is the capital of France? One word.").choices[0].message.content)


def roles(client: OpenAI, model: str) -> str:
    messages = [{"role": "developer", "content": "Answer in upper case."}, {"role": "user", "content": "Say hello."}]
    return repr(chat(client, model, "", messages=messages).choices[0].message.content)


def streamed_chat(client: OpenAI, model: str) -> str:
    chunks = list(chat(client, model, "Count to five.", stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return f"{len(chunks)} chunks, {chunks[-1].usage.completion_tokens} tokens: {text!r}"


def completion(client: OpenAI, model: str) -> str:
    answer = client.completions.create(model=model, prompt="def add(a, b):", max_tokens=12, temperature=0)
    return repr(answer.choices[0].text)


def embedding(client: OpenAI, model: str) -> str:
    return f"{len(client.embeddings.create(model=model, input='hello').data[0].embedding)} dimensions"


def schema(client: OpenAI, model: str) -> str:
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    answer = chat(client, model, "Where is the Eiffel Tower?", response_format=wanted)
    return str(json.loads(answer.choices[0].message.content))


def call_if_it_helps(client: OpenAI, model: str) -> str:
    return calls_of(chat(client, model, "What's the weather in Paris right now?", tools=TOOLS))


def no_call(client: OpenAI, model: str) -> str:
    return calls_of(chat(client, model, "Who wrote Hamlet?", tools=TOOLS))


def required_calls(client: OpenAI, model: str) -> str:
    question = "Weather in Paris and in Rome? Call for both."
    return calls_of(chat(client, model, question, tools=TOOLS, tool_choice="required"))


def named_call(client: OpenAI, model: str) -> str:
    choice = {"type": "function", "function": {"name": "set_timer"}}
    return calls_of(chat(client, model, "Ten minutes, please.", tools=TOOLS, tool_choice=choice))


def streamed_call(client: OpenAI, model: str) -> str:
    chunks = chat(client, model, "Set a timer for 10 minutes.", tools=TOOLS, tool_choice="required", stream=True)
    deltas = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or ()]
    arguments = "".join(delta.function.arguments or "" for delta in deltas if delta.index == 0)
    return f"{len(deltas)} deltas: {json.loads(arguments)}"


def result(client: OpenAI, model: str) -> str:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": "What's the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"celsius": 21, "sky": "clear"}'},
    ]
    return repr(chat(client, model, "", messages=messages, tools=TOOLS, tool_choice="none").choices[0].message.content)


def response(client: OpenAI, model: str) -> str:
    made = client.responses.create(
        model=model,
        instructions="Be brief.",
        input="What is the capital of Italy?",
        temperature=0,
        max_output_tokens=60,
    )
    return f"{made.status}: {made.output_text!r}"


def streamed_response(client: OpenAI, model: str) -> str:
    with client.responses.stream(
        model=model,
        input="Set a timer for 10 minutes.",
        tools=RESPONSE_TOOLS,
        tool_choice="required",
        temperature=0,
        max_output_tokens=80,
    ) as stream:
        events = len(list(stream))
        item: Any = stream.get_final_response().output[0]
    return f"{events} events: {item.name}({item.arguments})"


def response_schema(client: OpenAI, model: str) -> str:
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}}
    made = client.responses.create(model=model, input="Where is the Colosseum?", text=form, max_output_tokens=80)
    return str(json.loads(made.output_text))


def too_long(client: OpenAI, model: str) -> str:
    try:
        chat(client, model, "word " * 60_000)
    except openai.BadRequestError as error:
        return str(error.code)
    return "was answered"


TRIES: tuple[Try, ...] = (
    models,
    plain_chat,
    roles,
    streamed_chat,
    completion,
    embedding,
    schema,
    call_if_it_helps,
    no_call,
    required_calls,
    named_call,
    streamed_call,
    result,
    response,
    streamed_response,
    response_schema,
    too_long,
)


def main(url: str, names: list[str], key: str = "none") -> None:
    client = OpenAI(base_url=url, api_key=key, max_retries=0, timeout=300)
    for model in names:
        for attempt in TRIES:
            try:
                found = attempt(client, model)
            except (openai.OpenAIError, ValueError, LookupError, AttributeError) as error:
                found = f"FAILED {type(error).__name__}: {str(error)[:200]}"
            print(f"{model} | {attempt.__name__} | {found}", flush=True)


if __name__ == "__main__":
    sys.exit(run_tool(lambda: main(sys.argv[1], sys.argv[2:])))
