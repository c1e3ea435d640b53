"""Prompts of one's own, from a file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.workload import WorkItem, Workload, WorkloadContext
from hotswap.plugins.workloads.trace import Lines, existing

FORMS = ("prompt", "messages", "tokens")


class PromptsWorkload(Workload):
    """A JSON line a request: {"prompt": text}, {"messages": [...]} through the model's chat template, or {"tokens":
    [...]}; "max_tokens" is optional.

    Choose it where content matters: acceptance of drafts, answers to look at, one's own traffic. Arrivals come from the
    load settings.
    """

    class Options(ComponentOptions):
        path: Path
        """The file."""
        output: Annotated[int, Field(ge=1)] = 64
        """Tokens to generate where a line has no `max_tokens`."""

    def items(self, context: WorkloadContext) -> Iterator[WorkItem]:
        return self._items(context, Lines(existing(self.options.path)))

    def _items(self, context: WorkloadContext, lines: Lines) -> Iterator[WorkItem]:
        for value in lines.objects():
            output = value.get("max_tokens", self.options.output)
            if type(output) is not int or output < 1:
                lines.refuse(f"max_tokens should be a whole number of at least 1, not {output!r}.")
            prompt = self._prompt(value, context, lines)
            if len(prompt) + output > context.max_model_len:
                lines.refuse(
                    f"a prompt of {len(prompt)} and an output of {output} tokens do not fit the model's context of "
                    f"{context.max_model_len}.")
            yield WorkItem(tuple(prompt), output)

    def _prompt(self, value: dict[str, Any], context: WorkloadContext, lines: Lines) -> list[int]:
        forms = [form for form in FORMS if form in value]
        if len(forms) != 1:
            lines.refuse(f"should have one of {', '.join(FORMS)}, and has {' and '.join(forms) or 'none'}.")
        match forms[0], value[forms[0]]:
            case "prompt", str(text):
                prompt = context.encode(text)
            case "messages", [*messages] if messages and all(_is_message(message) for message in messages):
                if context.encode_chat is None:
                    lines.refuse("has messages, and the model has no chat template: give prompt or tokens.")
                prompt = context.encode_chat(messages)
            case "tokens", [*prompt] if all(type(t) is int and 0 <= t < context.vocab_size for t in prompt):
                pass
            case form, given:
                wanted = {"prompt": "a text", "messages": "a list of {role, content}",
                          "tokens": f"a list of ids from 0 to {context.vocab_size - 1}"}[form]
                lines.refuse(f"{form} should be {wanted}, not {str(given)[:60]}.")
        if not prompt:
            lines.refuse("its prompt has no token.")
        return prompt


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value
