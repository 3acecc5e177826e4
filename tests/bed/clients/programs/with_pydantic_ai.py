"""Flows of pydantic-ai: output by tool, by schema and by prompt; tool loops, whole and streamed."""

from __future__ import annotations

from flows import (
    ASK_ORDER,
    ASK_PERSON,
    ASK_TREE,
    ASK_WEATHER,
    EDGE,
    SCRIPTED,
    TIMEOUT_S,
    URL,
    Labels,
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
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    """A city, not a person."""

    city: str
    country: str


def agent(name: str, output: object, kind: type = OpenAIChatModel) -> Agent:
    client = AsyncOpenAI(base_url=URL, api_key="none", timeout=TIMEOUT_S, max_retries=0)
    model = kind(name, provider=OpenAIProvider(openai_client=client))
    settings = {"temperature": 0.0, "max_tokens": 300}
    return Agent(model, output_type=output, retries=0, model_settings=settings)


def weather(output: object, calls: list[str], kind: type = OpenAIChatModel) -> Agent:
    found = agent(SCRIPTED, output, kind)

    @found.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        calls.append(city)
        return "21 degrees" if city == "Paris" else "25 degrees"

    return found


@flow(EDGE, "output by tool")
async def by_tool() -> Result:
    return person((await agent(EDGE, ToolOutput(Person)).run(ASK_PERSON)).output)


@flow(EDGE, "output by tool, recursive")
async def tree_by_tool() -> Result:
    return tree((await agent(EDGE, ToolOutput(Tree)).run(ASK_TREE)).output)


@flow(EDGE, "output by tool, formats and unions")
async def order_by_tool() -> Result:
    return order((await agent(EDGE, ToolOutput(Order)).run(ASK_ORDER)).output)


@flow(EDGE, "output by schema, formats and unions")
async def order_by_schema() -> Result:
    return order((await agent(EDGE, NativeOutput(Order)).run(ASK_ORDER)).output)


@flow(EDGE, "a set is refused with its path")
async def refused() -> Result:
    message = ""
    try:
        message = repr(await agent(EDGE, NativeOutput(Labels)).run(ASK_ORDER))
    except ModelHTTPError as error:
        message = str(error)
    assert "`uniqueItems` at #/properties/labels" in message, message
    return message, True


@flow(EDGE, "output by one of two tools")
async def by_one_of_two() -> Result:
    found = (await agent(EDGE, [ToolOutput(Person), ToolOutput(City)]).run(ASK_PERSON)).output
    assert isinstance(found, Person | City)
    return found.model_dump(), isinstance(found, Person) and found.age == 36


@flow(EDGE, "output by schema")
async def by_schema() -> Result:
    return person((await agent(EDGE, NativeOutput(Person)).run(ASK_PERSON)).output)


@flow(EDGE, "output by schema, recursive")
async def tree_by_schema() -> Result:
    return tree((await agent(EDGE, NativeOutput(Tree)).run(ASK_TREE)).output)


@flow(EDGE, "output by schema of two types")
async def by_schema_of_two() -> Result:
    found = (await agent(EDGE, NativeOutput([Person, City])).run(ASK_PERSON)).output
    assert isinstance(found, Person | City)
    return found.model_dump(), isinstance(found, Person) and found.age == 36


@flow(EDGE, "output by schema, streamed")
async def streamed() -> Result:
    async with agent(EDGE, NativeOutput(Person)).run_stream(ASK_PERSON) as stream:
        return person(await stream.get_output())


@flow(EDGE, "output by tool, streamed, recursive")
async def tree_streamed() -> Result:
    async with agent(EDGE, ToolOutput(Tree)).run_stream(ASK_TREE) as stream:
        return tree(await stream.get_output())


@flow(EDGE, "responses: output by schema, recursive")
async def responses() -> Result:
    return tree((await agent(EDGE, NativeOutput(Tree), OpenAIResponsesModel).run(ASK_TREE)).output)


@flow(EDGE, "responses: output by tool")
async def responses_tool() -> Result:
    return person((await agent(EDGE, ToolOutput(Person), OpenAIResponsesModel).run(ASK_PERSON)).output)


@flow(SCRIPTED, "output by prompt")
async def by_prompt() -> Result:
    return report((await agent(SCRIPTED, PromptedOutput(Report)).run(ASK_WEATHER)).output)


@flow(SCRIPTED, "tool loop")
async def loop() -> Result:
    calls: list[str] = []
    return text((await weather(str, calls).run(ASK_WEATHER)).output, calls)


@flow(SCRIPTED, "tool loop that ends in an output tool")
async def loop_with_output() -> Result:
    calls: list[str] = []
    return report((await weather(ToolOutput(Report), calls).run(ASK_WEATHER)).output, calls)


@flow(SCRIPTED, "tool loop, streamed, and a second turn")
async def streamed_loop() -> Result:
    calls: list[str] = []
    asked = weather(str, calls)
    async with asked.run_stream(ASK_WEATHER) as stream:
        text(await stream.get_output(), calls)
    calls.clear()
    return text((await asked.run("And again?", message_history=stream.all_messages())).output, calls)


@flow(SCRIPTED, "responses: tool loop")
async def responses_loop() -> Result:
    calls: list[str] = []
    return text((await weather(str, calls, OpenAIResponsesModel).run(ASK_WEATHER)).output, calls)


@flow(SCRIPTED, "responses: tool loop, streamed")
async def responses_streamed_loop() -> Result:
    calls: list[str] = []
    async with weather(str, calls, OpenAIResponsesModel).run_stream(ASK_WEATHER) as stream:
        return text(await stream.get_output(), calls)


run_all()
