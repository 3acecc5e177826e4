"""Flows of openai-agents: output types, forced tools, tool loops and hand-overs, on both of OpenAI's interfaces."""

from __future__ import annotations

from agents import (
    Agent,
    AgentOutputSchema,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from flows import (
    ASK_ORDER,
    ASK_PERSON,
    ASK_TREE,
    ASK_WEATHER,
    EDGE,
    SCRIPTED,
    TIMEOUT_S,
    URL,
    Order,
    Person,
    Report,
    Result,
    Tree,
    flow,
    order,
    person,
    report,
    run_all,
    text,
    tree,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
CLIENT = AsyncOpenAI(base_url=URL, api_key="none", timeout=TIMEOUT_S, max_retries=0)


def agent(name: str, kind: type = OpenAIChatCompletionsModel, **fields: object) -> Agent:
    settings = ModelSettings(temperature=0, max_tokens=300, tool_choice=fields.pop("tool_choice", None))
    model = kind(model=name, openai_client=CLIENT)
    return Agent(name="assistant", instructions="Be exact.", model=model, model_settings=settings, **fields)


@function_tool
def save_person(found: Person) -> str:
    """Save a person."""
    return found.model_dump_json()


def weather(calls: list[str], kind: type = OpenAIChatCompletionsModel, **fields: object) -> Agent:
    @function_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        calls.append(city)
        return "21 degrees" if city == "Paris" else "25 degrees"

    return agent(SCRIPTED, kind, tools=[get_weather], **fields)


@flow(EDGE, "output type")
async def output() -> Result:
    return person((await Runner.run(agent(EDGE, output_type=Person), ASK_PERSON)).final_output)


@flow(EDGE, "output type, recursive")
async def recursive() -> Result:
    return tree((await Runner.run(agent(EDGE, output_type=Tree), ASK_TREE)).final_output)


@flow(EDGE, "output type that is not strict, formats and unions")
async def order_output() -> Result:
    output_type = AgentOutputSchema(Order, strict_json_schema=False)
    return order((await Runner.run(agent(EDGE, output_type=output_type), ASK_ORDER)).final_output)


@flow(EDGE, "forced tool")
async def forced() -> Result:
    fields = {"tools": [save_person], "tool_use_behavior": "stop_on_first_tool"}
    found = await Runner.run(agent(EDGE, tool_choice="save_person", **fields), ASK_PERSON)
    return person(Person.model_validate_json(found.final_output))


@flow(EDGE, "required tool, streamed")
async def required() -> Result:
    fields = {"tools": [save_person], "tool_use_behavior": "stop_on_first_tool"}
    found = Runner.run_streamed(agent(EDGE, tool_choice="required", **fields), ASK_PERSON)
    kinds = [event.type async for event in found.stream_events()]
    assert "raw_response_event" in kinds
    return person(Person.model_validate_json(found.final_output))


@flow(EDGE, "responses: output type, recursive")
async def responses() -> Result:
    found = await Runner.run(agent(EDGE, OpenAIResponsesModel, output_type=Tree), ASK_TREE)
    return tree(found.final_output)


@flow(EDGE, "responses: forced tool, streamed")
async def responses_forced() -> Result:
    fields = {"tools": [save_person], "tool_use_behavior": "stop_on_first_tool", "tool_choice": "save_person"}
    found = Runner.run_streamed(agent(EDGE, OpenAIResponsesModel, **fields), ASK_PERSON)
    async for _ in found.stream_events():
        pass
    return person(Person.model_validate_json(found.final_output))


@flow(SCRIPTED, "tool loop")
async def loop() -> Result:
    calls: list[str] = []
    return text((await Runner.run(weather(calls), ASK_WEATHER)).final_output, calls)


@flow(SCRIPTED, "tool loop, streamed")
async def streamed_loop() -> Result:
    calls: list[str] = []
    found = Runner.run_streamed(weather(calls), ASK_WEATHER)
    async for _ in found.stream_events():
        pass
    return text(found.final_output, calls)


@flow(SCRIPTED, "tool loop with an output type")
async def loop_with_output() -> Result:
    calls: list[str] = []
    return report((await Runner.run(weather(calls, output_type=Report), ASK_WEATHER)).final_output, calls)


@flow(SCRIPTED, "hand-over to an agent, then its tool loop")
async def hand_over() -> Result:
    calls: list[str] = []
    weather_agent = weather(calls)
    weather_agent.name = "Weather"
    return text((await Runner.run(agent(SCRIPTED, handoffs=[weather_agent]), ASK_WEATHER)).final_output, calls)


@flow(SCRIPTED, "two turns of a session")
async def session() -> Result:
    calls: list[str] = []
    kept, asked = SQLiteSession("bed"), weather(calls)
    text((await Runner.run(asked, ASK_WEATHER, session=kept)).final_output, calls)
    calls.clear()
    return text((await Runner.run(asked, "And again?", session=kept)).final_output, calls)


@flow(SCRIPTED, "responses: tool loop")
async def responses_loop() -> Result:
    calls: list[str] = []
    return text((await Runner.run(weather(calls, OpenAIResponsesModel), ASK_WEATHER)).final_output, calls)


@flow(SCRIPTED, "responses: tool loop, streamed, two turns of a session")
async def responses_session() -> Result:
    calls: list[str] = []
    kept, asked = SQLiteSession("bed"), weather(calls, OpenAIResponsesModel)
    for question in (ASK_WEATHER, "And again?"):
        calls.clear()
        found = Runner.run_streamed(asked, question, session=kept)
        async for _ in found.stream_events():
            pass
        text(found.final_output, calls)
    return text(found.final_output)


run_all()
