"""The prompts that a model's chat template makes, for training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jinja2
import jinja2.sandbox

from causeway_server.models.catalog.artifact import ArtifactError


class PromptRenderer:
    """One compiled chat template, for training and evaluation: trusted messages, no budget, no marks.

    Raises:
        ArtifactError: the template does not compile or render.
    """

    def __init__(self, template: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            self._template = environment.from_string(template)
        except jinja2.TemplateError as error:
            raise ArtifactError(f"the chat template does not compile: {error}") from error

    def user(self, text: str) -> str:
        """Render the prompt of one user message."""
        return self.render([{"role": "user", "content": text}])

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """Render `messages`, ending where the assistant's answer begins."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, bos_token="", eos_token="")
        except jinja2.TemplateError as error:
            raise ArtifactError(f"the chat template does not render: {error}") from error
