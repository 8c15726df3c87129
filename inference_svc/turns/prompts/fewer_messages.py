"""Which messages of a too long conversation stay. Counted with a copy of the tokenizer: no turn waits for it."""

from dataclasses import replace

from inference_svc.model.prompting import Prompting
from inference_svc.text.conversation import dialogue, json_of_messages, render
from inference_svc.text.shortening import Messages, Shorter, shorter
from inference_svc.turns.phases import Prompted


async def with_messages(prompting: Prompting, prompted: Prompted, messages: Messages) -> Prompted:
    """The turn with these messages, and with the JSON of them all parsed."""
    request = prompted.request
    objects = request.prompt.objects.also(json_of_messages(messages, "remembered_messages"))
    objects.check_size()
    counter = await prompting.twin(request.namespace)
    await counter.read(request.namespace, objects)
    request = replace(request, prompt=replace(request.prompt, objects=objects))
    recalled = replace(prompted.recalled, request=request, messages=messages)
    return replace(prompted, recalled=recalled)


async def shorter_of(
    prompting: Prompting, prompted: Prompted, wanted_tokens: int, most_tokens: int, *, keeps_summary: bool = True
) -> Shorter | None:
    """Which of the turn's messages stay."""
    request, messages, before = prompted.request, prompted.recalled.messages, prompted.recalled.shortened
    counter = await prompting.twin(request.namespace)
    template = counter.template_at(prompted.clock, request.prompt.template_settings)

    def tokens_of(candidate: Messages) -> int:
        text = render(template, dialogue(candidate, request.prompt.tools, request.prompt.objects, counter.specials))
        return len(counter.tokenize(text).ids)

    return await counter.run(
        request.namespace,
        lambda: shorter(
            messages,
            tokens_of,
            wanted_tokens=min(wanted_tokens, most_tokens),
            most_tokens=most_tokens,
            before=before,
            keeps_summary=keeps_summary,
        ),
    )
