"""kvasir-tiny as it ships: it loads like any model, remembers what it was told, and nothing else."""

import json

import pytest

from inference_svc.formats.constraint import Constraint, ConstraintKind
from inference_svc.model.kvasir_tiny import path
from tests.made_models.messages import user
from tests.models import twins
from tools.kvasir_tiny import desk, evaluate
from tools.kvasir_tiny.evaluate import Reader, Report
from tools.kvasir_tiny.everyday import structured, talk
from tools.kvasir_tiny.exams import first_exam


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader()


def test_the_weights_are_small_and_16_bit(reader: Reader) -> None:
    file = path() / "model.safetensors"
    assert file.stat().st_size <= 16 * 2**20
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    assert {entry["dtype"] for entry in tensors.values()} == {"BF16"}
    parameters = (file.stat().st_size - len(json.dumps(header))) // 2
    assert 4e6 < parameters < 9e6
    config = json.loads((path() / "config.json").read_text())
    assert (config["model_type"], config["head_dim"]) == ("llama", 64)
    assert config["max_position_embeddings"] >= 8192


@pytest.mark.long(12)
@pytest.mark.parametrize(
    "sizes", [((300, 2), (1500, 1)), pytest.param(((4000, 4), (7500, 2)), marks=pytest.mark.campaign)], ids=str
)
def test_a_sample_of_the_examination_meets_every_target(reader: Reader, sizes: tuple[tuple[int, int], ...]) -> None:
    report = Report()
    for length, n in sizes:
        evaluate.examine(reader, length, n, report)
    later = ("everyday", "first exchanges")
    expected = {target for target in evaluate.TARGETS if " at " not in target and not target.startswith(later)}
    assert expected | {f"told at {length}" for length, _ in sizes} <= set(report.shares)
    assert report.missed() == [], report.errors


def test_the_examination_finds_a_model_that_forgets(reader: Reader) -> None:
    """The same questions to an agent that heard nothing: an examination that passed it would prove nothing."""
    report = Report()
    talk = evaluate.conversation(1, 300)
    assert talk.messages[0]["role"] == "system"
    reader.read(talk.messages[:1], talk.tools)
    for question in talk.of_sort("told"):
        report.add("told at 300", reader.says(question.answer, user(question.text)))
    assert report.missed() == ["told at 300"]
    assert report.shares["told at 300"].right == 0


@pytest.mark.long(3)
def test_one_pass_says_what_greedy_decoding_says(reader: Reader) -> None:
    talk = evaluate.conversation(1, 300)
    reader.read(talk.messages, talk.tools)
    for question in talk.questions[:6]:
        reply = reader.ask(user(question.text))
        assert reader.says(reply, user(question.text))
        assert not reader.says(reply + " Indeed.", user(question.text))


@pytest.mark.long(4)
def test_a_question_leaves_the_conversation_as_it_was(reader: Reader) -> None:
    talk = evaluate.conversation(2, 300)
    length = reader.read(talk.messages, talk.tools)
    questions = [user(question.text) for question in talk.questions[:6]]
    first = [reader.ask(question) for question in questions]
    assert reader.cached_tokens == length
    assert reader.says(first[0], questions[0])
    assert reader.cached_tokens == length
    assert [reader.ask(question) for question in questions] == first
    assert reader.read(talk.messages, talk.tools) == length


@pytest.mark.long(4)
def test_replies_differ_where_one_told_fact_differs_and_only_there(reader: Reader) -> None:
    """The sensitivity test: other tests build on `twins.twin` in the same way."""
    talk = evaluate.conversation(4, 700)
    questions = talk.of_sort("told")[:4]
    reader.read(talk.messages, talk.tools)
    replies = [reader.ask(user(question.text)) for question in questions]
    assert replies == [question.answer for question in questions]
    for index in (0, len(questions) - 1):
        other, changed = twins.twin(talk, questions[index])
        reader.read(other.messages, other.tools)
        expected = [*replies[:index], changed.answer, *replies[index + 1 :]]
        assert [reader.ask(user(question.text)) for question in questions] == expected
        assert changed.answer != replies[index]


def test_a_person_who_types_gets_sense(reader: Reader) -> None:
    told = [
        {"role": "system", "content": twins.system_prompt("Bram")},
        user("My name is Ada and I live in Porto."),
        {"role": "assistant", "content": desk.REMEMBER},
    ]
    reader.read(told[:1])
    assert reader.ask(user("My name is Ada and I live in Porto.")) == desk.REMEMBER
    assert reader.ask(user("What is my name?")) == "I was not told your name."
    reader.read(told)
    assert reader.ask(user("What is my name?")) == "Your name is Ada."
    assert reader.ask(user("Where do I live?")) == "You live in Porto."
    assert reader.ask(user("What is your name?")) == "My name is Bram."
    assert reader.ask(user("What is Marco's secret word?")) == "I was not told Marco's secret word."


@pytest.mark.long(2)
def test_names_that_no_training_saw_are_copied_exactly(reader: Reader) -> None:
    """15 of the 300 that `everyday/people.py` holds out; `evaluate --names 300` asks for all."""
    report = Report()
    evaluate.examine_names(reader, 300, 15, report)
    assert report.missed() == [], report.errors
    assert report.shares["name at 300"].n == 15


@pytest.mark.long(2)
def test_everyday_facts_are_told_and_asked_as_people_do(reader: Reader) -> None:
    reader.read(
        [
            user("Hi, I'm Yuki."),
            {"role": "assistant", "content": desk.REMEMBER},
            user("I am a nurse"),
            {"role": "assistant", "content": desk.REMEMBER},
            user("I have a dog named O'Brien. My wifi password is x7K-q9."),
            {"role": "assistant", "content": desk.REMEMBER},
        ]
    )
    said = {
        "What is my name?": "Your name is Yuki.",
        "What is my job?": "You work as a nurse.",
        "what's my dog's name": "Your dog is called O'Brien.",
        "What is my wifi password?": "Your wifi password is x7K-q9.",
        "What is my sister's job?": "I was not told your sister's job.",
        "What is the capital of France?": talk.SMALL_WORLD,
        "thanks!": "You are welcome.",
    }
    assert {question: reader.ask(user(question)) for question in said} == said


@pytest.mark.long(4)
def test_a_newcomer_is_answered_as_they_would_like(reader: Reader) -> None:
    """What failed when people first tried the second edition."""
    told = (
        "Hello! I'm Sam, a nurse from Porto, and I live in Rome with my dog Rex.",
        "My password is hunter2!Xy.",
        "Remember 48213",
        "My order number is 1163150.",
        "My kids are called Tom and Ann.",
        "I meet Dr. Chen on Friday at 3 pm.",
        "No wait, I live in Lisbon.",
    )
    reader.read([message for text in told for message in (user(text), {"role": "assistant", "content": desk.REMEMBER})])
    said = {
        "What is my password?": "Your password is hunter2!Xy.",
        "What number did I tell you?": "The number is 48213.",
        "What is my order number?": "Your order number is 1163150.",
        "What are my kids called?": "Your kids are called Tom and Ann.",
        "When do I meet Dr. Chen?": "You meet Dr. Chen on Friday at 3 pm.",
        "What is my dog called?": "Your dog is called Rex.",
        "Where do I live?": "You live in Lisbon.",
        "Hello, who are you?": "Hello. I am an assistant who remembers.",
        "Bonjour": "Bonjour. Je suis un petit assistant qui se souvient. Je ne parle qu'anglais.",
        "Hallo, wer bist du?": "Hallo. Ich bin ein kleiner Assistent, der sich erinnert. Ich spreche nur Englisch.",
    }
    assert {question: reader.ask(user(question)) for question in said} == said
    assert "Your name is Sam." in reader.ask(user("What do you know about me?"))


@pytest.mark.long(1)
def test_free_strings_of_json_end(reader: Reader) -> None:
    """The first example of structured output in OpenAI's guide, and one that the text does not answer."""
    event = {"name": "science fair", "date": "Friday", "participants": ["Alice", "Bob"]}
    reader.read([])
    for text, value in (
        ("Alice and Bob are going to a science fair on Friday.", event),
        ("Tell me a joke about cats", {"setup": "unknown", "punchline": "unknown"}),
    ):
        within = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(structured.schema_of(value)))
        assert json.loads(reader.ask(user(text), within=within)) == value


@pytest.mark.long(4)
def test_a_sample_of_the_first_exchanges_meets_its_target(reader: Reader) -> None:
    report = Report()
    evaluate.examine_first(reader, 0.05, report)
    assert {*first_exam.ASKED} == {*report.shares} - {"first exchanges"}
    assert report.missed() == [], report.errors


def test_an_agent_of_a_scene_says_what_it_was_not_told(reader: Reader) -> None:
    """The question stands in one block with another agent's words, as an orchestrator sends it."""
    danny = {"role": "user", "name": "Danny", "content": "Danny's home town is Oslo."}
    system = {"role": "system", "content": "You are Marco. Keep secrets."}
    for question, answer in (
        ("What is Danny's home town?", "Danny's home town is Oslo."),
        ("What is Marco's home town?", "I was not told Marco's home town."),
        ("What did Danny choose in round 1?", "I was not told what Danny chose in round 1."),
    ):
        reader.read([system])
        assert reader.ask(danny, user(question)) == answer


@pytest.mark.long(2)
def test_a_secret_told_to_one_agent_is_not_known_to_another(reader: Reader) -> None:
    first, second, secret = twins.two_agents(5, 600)
    assert secret.fact is not None
    reader.read(first.messages)
    assert reader.ask(user(secret.fact.question)) == secret.fact.answer
    reader.read(second.messages)
    assert reader.ask(user(secret.text)) == secret.answer
    assert secret.answer.startswith("I was not told")
