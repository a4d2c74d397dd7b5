"""A local model as the verifier, with an engine of its own that keeps what it has read of a draft (mintrl 5.3, 5.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastcollab.config import SamplingParams, require
from fastcollab.engine import Engine
from fastcollab.verifiers import Request, Template, Verdict, next_ids, settle, verdict_choices

Choices = Mapping[tuple[int, ...], Verdict]  # every verdict that may be given, by the ids that say it


class ModelVerifier:
    """``model``: a path, ``PreTrainedModel`` or ``Model``, the policy's own module too; ``engine``: settings of Engine.

    A verdict is written greedily among ``choices(request)`` (default: KEEP and REVISE <n>), so that none is malformed.
    A correction is written greedily, ``max_tokens`` + 1 ids at most. Each is a prompt that begins with the draft as it
    was shown before, so its KV is found in the cache and only what is new is read.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        template: Template | None = None,
        max_tokens: int = 32,
        choices: Callable[[Request], Choices] | None = None,
        chat_template_kwargs: dict | None = None,
        **engine: Any,
    ) -> None:
        require(max_tokens >= 1, "max_tokens", max_tokens, ">= 1")
        self.engine = Engine({"verifier": model}, tokenizer, **engine)
        tokenizer = self.engine.tokenizer
        require(tokenizer is not None, "tokenizer", None, "one, for a verifier reads and writes text")
        self.end_id = min(self.engine.models["verifier"].eos_ids, default=None)
        require(self.end_id is not None, "eos_token_id", None, "one, which ends a verdict")
        self.template, self.max_tokens = template or Template(), max_tokens
        self.chat_template_kwargs = chat_template_kwargs
        self.choices = choices or (lambda request: verdict_choices(tokenizer, request, self.end_id))

    def review(self, requests: Sequence[Request]) -> list[Verdict]:
        choices = [self.choices(request) for request in requests]
        longest = max(len(ids) for found in choices for ids in found)
        prompts = [self._prompt(self.template.verdict_messages(request)) for request in requests]
        said = self._write(prompts, longest, lambda group, ids: next_ids(choices[group], ids))
        return [settle(found[tuple(r.ids)], q) for found, r, q in zip(choices, said, requests, strict=True)]

    def correct(self, requests: Sequence[Request]) -> list[str]:
        prompts = [self._prompt(self.template.fix_messages(request)) for request in requests]
        return [rollout.text for rollout in self._write(prompts, self.max_tokens + 1)]

    def _prompt(self, messages: list[dict[str, str]]) -> Any:
        """The messages, or their text where the tokenizer has no chat template."""
        if getattr(self.engine.tokenizer, "chat_template", None):
            return messages
        return "\n\n".join(message["content"] for message in messages) + "\n"

    def _write(self, prompts: list[Any], n: int, allowed: Callable | None = None) -> list[Any]:
        sampling, kwargs = SamplingParams(temperature=0.0, max_new_tokens=n), self.chat_template_kwargs
        return self.engine.generate(prompts, sampling=sampling, chat_template_kwargs=kwargs, allowed=allowed)
