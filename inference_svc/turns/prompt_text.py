"""The text of a turn's prompt: the caller's own, or a conversation through the model's template."""

from collections.abc import Sequence

from kvasir.cachestore.v1 import manifest_pb2

from inference_svc.model.prompting import Prompting
from inference_svc.text.conversation import Dialogue, dialogue, json_of_messages, render
from inference_svc.text.literal_text import from_outside
from inference_svc.text.template_clock import TemplateClock
from inference_svc.turns.turn_data import MessagesInput, PromptInput, TurnRequest


async def prompt_text(
    prompting: Prompting, request: TurnRequest, messages: Sequence[manifest_pb2.Message], clock: TemplateClock
) -> tuple[str, Dialogue | None]:
    """The text, and the conversation that it renders. `messages` are all messages, the remembered ones included.
    Raises InvalidArgument that names the field.
    """
    given = request.input
    if isinstance(given, PromptInput):
        return from_outside(given.prompt), None
    assert isinstance(given, MessagesInput)  # tokens have their text already
    objects = request.objects
    # Where a long conversation was shortened, some of the given ones are not among them.
    if remembered := messages[: max(len(messages) - len(given.messages), 0)]:
        objects = objects.also(json_of_messages(remembered, "remembered_messages"))
        objects.check_size()
    await prompting.read(request.namespace, objects)

    def rendered() -> tuple[str, Dialogue]:
        conversation = dialogue(messages, request.tools, objects, prompting.specials)
        return render(prompting.template_at(clock), conversation), conversation

    return await prompting.run(request.namespace, rendered)
