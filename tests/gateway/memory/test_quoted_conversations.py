"""Which conversation a request quotes in its own text: by its lines, or by its calls."""

import asyncio

from kvasir_gateway.turn import Said, ToolUse

from tests.gateway.dialects.test_conversations import Records, Talk, conversations, reply, user

TASK = user("Find out why the library does not build with the new compiler.")
FOUND = "- the header of the reader is included twice, and once without its guard"
TRANSCRIPT = (
    Said("system", "You summarize conversations."),
    user(
        f"[User]: {TASK.content}\n[Tool]: {FOUND}\n[Assistant]: The reader's header lost its guard in the last change."
    ),
)


def quoted(talk: Talk, messages: tuple[Said, ...], hint: str = "session") -> str:
    return asyncio.run(talk.known.quoted_by(talk.known.chain(messages, hint), messages, talk.records)).agent_id


def test_the_conversation_that_a_request_quotes_in_its_own_text_is_the_one_with_most_of_its_lines() -> None:
    talk = Talk(conversations(), Records())
    talk.turn(user("Look for includes."), answer=FOUND, hint="session")
    talk.turn(TASK, answer="Another session asked the same.", hint="other")
    agent = talk.turn(TASK, hint="session", answer="I have it looked for.")
    known = (TASK, reply("I have it looked for."), Said("tool", FOUND))
    assert talk.turn(*known, answer="The reader's header lost its guard in the last change.", hint="session") == agent
    talk.known = conversations()  # a restart of the gateway
    assert quoted(talk, TRANSCRIPT) == agent
    assert quoted(talk, (TRANSCRIPT[0], user("[User]: Hello.\n[Assistant]: Hi."))) == ""
    assert quoted(talk, TRANSCRIPT, "third") == ""
    talk.records.is_down = True
    assert quoted(talk, TRANSCRIPT) == ""


def test_calls_that_stand_in_the_text_of_older_replies_are_no_lines_that_a_request_leaves_out() -> None:
    talk = Talk(conversations(), Records())
    agent = talk.turn(TASK, answer="It builds again.", hint="session")
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "reader.h"}}\n</tool_call>'
    read = [said for number in "1234" for said in (reply(call), Said("tool", FOUND, tool_call_id=f"c{number}"))]
    talk.records.remembered[agent] = (TASK, *read, reply("It builds again."))
    transcript = user(f"[User]: {TASK.content}\n[Tool]: {FOUND}\n[Assistant]: It builds again.")
    assert quoted(talk, (TRANSCRIPT[0], transcript)) == agent


def test_a_conversation_that_read_the_same_file_is_not_the_quoted_one() -> None:
    talk = Talk(conversations(), Records())
    readme = "This library keeps what agents know, and gives it back to them whole."
    other = user(
        f"Write a poem of the sea for my sister's wedding.\n{readme}\nIt is to have fourteen lines, all of them long."
    )
    agent = talk.turn(other, answer="The waves come in, the waves go out, and all the gulls are here.", hint="session")
    read = (user("Look into the file."), reply("I look into it."), Said("tool", TASK.content))
    talk.turn(*read, answer="It says why the library does not build, in the second chapter.", hint="session")
    transcript = (TRANSCRIPT[0], user(f"[User]: {TASK.content}\n[Tool]: {readme}\n[Assistant]: It builds again."))
    assert quoted(talk, transcript) == ""
    whole = f"[User]: {other.content}\n[Assistant]: The waves come in, the waves go out, and all the gulls are here."
    assert quoted(talk, (TRANSCRIPT[0], user(whole))) == agent


# What opencode sends for a summary, in words of ours: the whole conversation as one text of the user's.
FEW_WORDS = """Here is the conversation so far:

<conversation>
[User]: "Make it blue."

[Assistant tool call]: read({"filePath":"anna/notes.txt"})
[Tool result]: 1: the colour is red

[Assistant tool call]: edit({"filePath":"anna/notes.txt","oldString":"red","newString":"blue"})
[Tool result]: It is written.

[Assistant]: Done.
</conversation>

Sum it up."""


def test_a_conversation_of_few_words_is_known_by_its_calls_when_it_is_quoted() -> None:
    talk, system = Talk(conversations(), Records()), Said("system", "You write code.")
    path = '{"filePath": "anna/notes.txt"'
    read, edit = (
        Said("assistant", "", tool_calls=(ToolUse(name, name, arguments),))
        for name, arguments in (("read", f"{path}}}"), ("edit", f'{path}, "oldString": "red", "newString": "blue"}}'))
    )
    opening = (system, user('"Make it blue."'))
    known = (*opening, read, Said("tool", "1: the colour is red"), edit, Said("tool", "It is written."))
    agent = talk.turn(*known, answer="Done.")
    for other in ("Look.", "Count."):
        talk.turn(system, user(other), read, Said("tool", "the colour is red"), answer="I have looked.")
    assert quoted(talk, (TRANSCRIPT[0], user(FEW_WORDS)), "") == agent
    hello = talk.turn(system, user("Hello."), answer="Hi.")
    assert quoted(talk, (TRANSCRIPT[0], user("[User]: Hello.\n\n[Assistant]: Hi.")), "") == "", hello


def test_a_conversation_of_few_words_that_read_the_same_file_is_not_the_quoted_one() -> None:
    """Its call and its answer are in the quoted conversation, which no agent remembers; its user's words are not."""
    talk = Talk(conversations(), Records())
    read = ToolUse("c1", "read", '{"filePath": "anna/notes.txt"}')
    known = (user("Count the words."), Said("assistant", "", tool_calls=(read,)), Said("tool", "red"))
    talk.turn(*known, answer="Done.")
    assert quoted(talk, (TRANSCRIPT[0], user(FEW_WORDS)), "") == ""


def test_a_conversation_of_many_calls_is_known_by_its_lines_where_no_call_is_quoted() -> None:
    talk = Talk(conversations(), Records())
    calls = tuple(ToolUse(f"c{number}", "look", f'{{"page": {number}}}') for number in range(20))
    answer = "The reader's header lost its guard in the last change."
    agent = talk.turn(TASK, Said("assistant", "", tool_calls=calls), Said("tool", FOUND), answer=answer)
    assert quoted(talk, TRANSCRIPT, "") == agent
