"""A local model as the verifier, with an engine of its own that keeps what it has read of a draft (mintrl 5.3, 5.4)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from fastcollab.config import SamplingParams, require
from fastcollab.engine import Engine
from fastcollab.tokens import encode_prompt
from fastcollab.types import Rollout
from fastcollab.verifiers import Keep, Request, Template, Verdict, next_ids, settle, verdict_choices

Choices = Mapping[tuple[int, ...], Verdict]  # every verdict that may be given, by the ids that say it


class ModelVerifier:
    """``model``: a path, ``PreTrainedModel`` or ``Model``, the policy's own module too; ``engine``: settings of Engine.

    A verdict is written greedily among ``choices(request)`` (default: KEEP and REVISE <n>), so that none is malformed.
    A correction is written greedily, ``max_tokens`` + 1 ids at most. Each is a prompt that begins with the draft as it
    was shown before, so its KV is found in the cache and only what is new is read. A draft too long for the model or
    its KV pool has no verdict, Keep("malformed"), and no correction; a warning tells of the first.
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
        longest, blocks = self.engine.models["verifier"].max_length, self.engine.num_blocks[0]
        self.room = min(
            blocks * self.engine.block_size, longest or 1 << 62
        )  # ids that a prompt and its answer may have
        self._warned = False
        self.choices = choices or (lambda request: verdict_choices(tokenizer, request, self.end_id))

    def review(self, requests: Sequence[Request]) -> list[Verdict]:
        choices = [self.choices(request) for request in requests]
        longest = max(len(ids) for found in choices for ids in found)
        prompts = [self._prompt(self.template.verdict_messages(request)) for request in requests]
        said = self._write(prompts, longest, lambda group, ids: next_ids(choices[group], ids))
        given = [
            Keep("malformed") if r is None else found[tuple(r.ids)] for found, r in zip(choices, said, strict=True)
        ]
        return [settle(verdict, request) for verdict, request in zip(given, requests, strict=True)]

    def correct(self, requests: Sequence[Request]) -> list[str | None]:
        prompts = [self._prompt(self.template.fix_messages(request)) for request in requests]
        return [None if r is None else r.text for r in self._write(prompts, self.max_tokens + 1)]

    def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of the messages, or of their text where the tokenizer has no chat template."""
        tokenizer, kwargs = self.engine.tokenizer, self.chat_template_kwargs
        text = "\n\n".join(message["content"] for message in messages)
        if not getattr(tokenizer, "chat_template", None):
            return encode_prompt(tokenizer, text + "\n", 0)
        try:
            return encode_prompt(tokenizer, messages, 0, kwargs)
        except TemplateError:  # "System role not supported", as some say
            return encode_prompt(tokenizer, [{"role": "user", "content": text}], 0, kwargs)

    def _write(self, prompts: list[list[int]], n: int, allowed: Callable | None = None) -> list[Rollout | None]:
        """At most ``n`` ids behind each prompt; None for a prompt that leaves no room for them."""
        fits = [i for i, ids in enumerate(prompts) if len(ids) + n <= self.room]
        if len(fits) < len(prompts) and not self._warned:
            self._warned = True
            longest = max(map(len, prompts))
            message = f"verifier: got a draft of {longest} ids, need <= {self.room - n}: such drafts stay unreviewed"
            warnings.warn(message, stacklevel=2)
        if not fits:
            return [None] * len(prompts)
        made = self.engine.generate(
            [prompts[i] for i in fits],
            sampling=SamplingParams(temperature=0.0, max_new_tokens=n),
            allowed=None if allowed is None else lambda group, ids: allowed(fits[group], ids),
        )
        found = dict(zip(fits, made, strict=True))
        return [found.get(i) for i in range(len(prompts))]
