"""LangChain's ChatOpenAI, unmodified but for base_url: turns, a stream, a tool, structured output, a cancel."""

import json
import os
import sys
from pathlib import Path
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage, messages_from_dict, messages_to_dict
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict


class Colour(BaseModel):
    """A colour."""

    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "green"]


@tool
def weather(place: str) -> str:
    """the weather of a place"""
    return f"sunny in {place}"


def cached(message: AIMessage) -> int:
    return (message.usage_metadata or {}).get("input_token_details", {}).get("cache_read", 0)


def main() -> None:
    chat = ChatOpenAI(
        base_url=os.environ["KVASIR_URL"] + "/v1",
        api_key=os.environ["KVASIR_KEY"],
        model=os.environ["KVASIR_MODEL"],
        max_tokens=40,
    )
    kept = Path(os.environ["KVASIR_TOLD"])
    if sys.argv[1:]:
        again = chat.invoke([*messages_from_dict(json.loads(kept.read_text())), HumanMessage("And now?")])
        assert cached(again) > 30, again.usage_metadata
        print("LangChain: after kill -9 of everything, cached", cached(again))
        return
    told = [HumanMessage("My name is Anna.")]
    told += [chat.invoke(told), HumanMessage("What is my name?")]
    second = chat.invoke(told)
    assert "Anna" in second.text, second
    assert cached(second) > 15, second.usage_metadata
    kept.write_text(json.dumps(messages_to_dict([*told, second])))
    streamed = "".join(chunk.text for chunk in chat.stream(told))
    assert streamed == second.text, (streamed, second.text)
    for _ in chat.stream(told):
        break  # a cancel: the stream is closed
    asked = [HumanMessage("What is the weather in Paris?")]
    with_tool = chat.bind_tools([weather])
    calling = with_tool.invoke(asked)
    assert calling.tool_calls[0]["name"] == "weather", calling
    asked += [
        calling,
        ToolMessage(weather.invoke(calling.tool_calls[0]["args"]), tool_call_id=calling.tool_calls[0]["id"]),
    ]
    answer = with_tool.invoke(asked)
    assert answer.text, answer
    assert cached(answer) > 0, answer.usage_metadata
    colour = chat.with_structured_output(Colour).invoke("My favourite colour is red.")
    assert isinstance(colour, Colour), colour
    print("LangChain: turns, stream, cancel, tool, structured output; cached", cached(second), "and", cached(answer))


if __name__ == "__main__":
    main()
