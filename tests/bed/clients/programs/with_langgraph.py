"""Flows of LangGraph: graphs whose nodes ask for objects, and agents with tools and a checkpoint."""

from __future__ import annotations

from typing import TypedDict

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
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.prebuilt import create_react_agent


class State(TypedDict, total=False):
    """The state of the graphs with one node."""

    question: str
    found: object


def model(name: str, **fields: object) -> ChatOpenAI:
    fields = {"temperature": 0, "max_tokens": 300, "timeout": TIMEOUT_S, "max_retries": 0} | fields
    return ChatOpenAI(model=name, base_url=URL, api_key="none", **fields)


async def ask(question: str, kind: type, method: str, name: str = EDGE, **fields: object) -> object:
    """Run a graph of one node, whose model answers with an object."""
    asked = model(name, **fields).with_structured_output(kind, method=method)

    async def node(state: State) -> State:
        return {"found": await asked.ainvoke(state["question"])}

    graph = StateGraph(State)
    graph.add_node("ask", node)
    graph.add_edge(START, "ask")
    graph.add_edge("ask", END)
    return (await graph.compile().ainvoke({"question": question}))["found"]


def weather(calls: list[str], **fields: object) -> object:
    @tool
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        calls.append(city)
        return "21 degrees" if city == "Paris" else "25 degrees"

    return create_react_agent(model(SCRIPTED), [get_weather], **fields)


@flow(EDGE, "node with a schema")
async def schema() -> Result:
    return person(await ask(ASK_PERSON, Person, "json_schema"))


@flow(EDGE, "node with a schema, recursive")
async def recursive_schema() -> Result:
    return tree(await ask(ASK_TREE, Tree, "json_schema"))


@flow(EDGE, "node with a forced tool")
async def forced() -> Result:
    return person(await ask(ASK_PERSON, Person, "function_calling"))


@flow(EDGE, "node with a forced tool, recursive", client_loses="For LangChain a recursive member is `{}`.")
async def recursive_forced() -> Result:
    return tree(await ask(ASK_TREE, Tree, "function_calling"))


@flow(EDGE, "node with a forced tool, formats and unions")
async def order_forced() -> Result:
    return order(await ask(ASK_ORDER, Order, "function_calling"))


@flow(EDGE, "node with a schema, streamed")
async def streamed() -> Result:
    return person(await ask(ASK_PERSON, Person, "json_schema", streaming=True))


@flow(EDGE, "responses: node with a schema, recursive")
async def responses() -> Result:
    return tree(await ask(ASK_TREE, Tree, "json_schema", use_responses_api=True))


@flow(SCRIPTED, "JSON mode")
async def json_mode() -> Result:
    return report(await ask(f"{ASK_WEATHER} Answer by the schema.", Report, "json_mode", SCRIPTED))


@flow(SCRIPTED, "agent")
async def agent() -> Result:
    calls: list[str] = []
    found = await weather(calls).ainvoke({"messages": [("user", ASK_WEATHER)]})
    return text(found["messages"][-1].content, calls)


@flow(SCRIPTED, "agent, streamed, two turns from a checkpoint")
async def checkpoint() -> Result:
    calls: list[str] = []
    asked = weather(calls, checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "one"}}
    for question in (ASK_WEATHER, "And again?"):
        calls.clear()
        pieces = [
            piece.content
            async for piece, about in asked.astream({"messages": [("user", question)]}, config, stream_mode="messages")
            if about["langgraph_node"] == "agent"
        ]
        text("".join(pieces), calls)
    return text("".join(pieces))


@flow(SCRIPTED, "agent with an object as its answer")
async def agent_with_object() -> Result:
    calls: list[str] = []
    found = await weather(calls, response_format=Report).ainvoke({"messages": [("user", ASK_WEATHER)]})
    return report(found["structured_response"], calls)


run_all()
