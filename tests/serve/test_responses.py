"""`/v1/responses`: through the `openai` client, and the events of written answers."""

import json

import openai
import pytest
from serving import serving
from test_wire import ANSWER, CALL, PREAMBLE, THOUGHT, answered

import outpace
from outpace.serve.responses import ResponsesBody, Writer, messages_of
from outpace.text.messages import System, parse_conversation


@pytest.fixture(scope="module")
def client():
    with serving(outpace.load("default")) as (_, address):
        yield openai.OpenAI(base_url=address + "/v1", api_key="any", max_retries=0)


def ask(client, question="What is 12 + 7?", **more):
    return client.responses.create(model="default", input=question, **{"temperature": 0} | more)


def test_a_response_is_the_chats_answer(client):
    made = ask(client, max_output_tokens=80)
    chat = client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "What is 12 + 7?"}], temperature=0
    )
    message = chat.choices[0].message
    assert made.status == "completed" and made.output_text == message.content
    assert [item.type for item in made.output] == ["reasoning", "message"]
    assert made.output[0].content[0].text == message.reasoning
    assert made.usage.input_tokens == chat.usage.prompt_tokens
    assert (
        made.usage.output_tokens
        == chat.usage.completion_tokens
        > made.usage.output_tokens_details.reasoning_tokens
        > 0
    )


def test_the_events_of_a_stream_add_up_to_the_response(client):
    whole, text, thought, number = ask(client), "", "", 0
    for event in ask(client, stream=True):
        assert event.sequence_number == number
        number += 1
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type == "response.reasoning_text.delta":
            thought += event.delta
    assert event.type == "response.completed" and number > 20
    assert text == whole.output_text == event.response.output_text
    assert thought == whole.output[0].content[0].text == event.response.output[0].content[0].text


def test_a_response_goes_on_from_one_before(client):
    first = ask(client)
    history = [
        {"role": "user", "content": "What is 12 + 7?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Add 3 and 4."},
    ]
    by_id = ask(client, "Add 3 and 4.", previous_response_id=first.id)
    by_hand = ask(client, history)
    assert by_id.output_text == by_hand.output_text
    assert by_id.usage.input_tokens == by_hand.usage.input_tokens
    assert by_id.previous_response_id == first.id
    unkept = ask(client, store=False)
    with pytest.raises(openai.BadRequestError, match="is not kept here"):
        ask(client, previous_response_id=unkept.id)


def test_what_is_cut_off_says_so(client):
    cut = ask(client, max_output_tokens=4)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    assert cut.usage.output_tokens == 4 and cut.output[0].status == "incomplete"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"background": True}, "background: this server does not implement it"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type: 'web_search'"),
        ({"input": [{"type": "image"}]}, r"input\[0\].type: 'image'"),
        ({"input": []}, "messages: there is none"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "only text"),
        ({"previous_response_id": "resp_x"}, "'resp_x' is not kept here"),
    ],
)
def test_what_is_refused(client, change, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(**{"model": "default", "input": "x"} | change)


def written(text):
    """-> the events of an answer with these tokens, as a client gets them."""
    answer, pieces = answered(text)
    writer = Writer(ResponsesBody(input="x"), "m")
    events = list(writer.begin())
    for piece in pieces:
        events += [json.loads(json.dumps(event)) for event in writer.add(piece)]
    list(writer._close())
    return events, writer.response["output"], answer


@pytest.mark.parametrize("text", [THOUGHT + ANSWER, THOUGHT + PREAMBLE + CALL, THOUGHT + CALL])
def test_items_of_every_kind_and_back_into_messages(text):
    events, output, _ = written(text)
    kinds = [item["type"] for item in output]
    assert kinds == [
        "reasoning",
        *["message"] * (PREAMBLE in text or ANSWER in text),
        *["function_call"] * (CALL in text),
    ]
    assert all(item["status"] == "completed" for item in output)
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == ('{"a": "é"}' if CALL in text else "")
    opened = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    assert opened == list(range(len(output)))
    more = [{"type": "message", "role": "user", "content": "and?"}]
    if CALL in text:
        assert output[-1]["name"] == "get_x"
        more.insert(0, {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "5"})
    conversation = parse_conversation({"messages": messages_of([*output, *more])}, system=System())
    channels = [m.channel for m in conversation.messages]
    assert channels[0] == "analysis" and conversation.messages[-1].content == "and?"
    assert any(m.is_call and m.recipient == "functions.get_x" for m in conversation.messages) == (
        CALL in text
    )
