"""A local model as the verifier, with an engine of its own that keeps what it has read of a draft (mintrl 5.3, 5.4)."""

from __future__ import annotations

import warnings
from collections import Counter
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

    A verdict is written greedily among ``choices(request)`` (default: KEEP and REVISE <n>), so that none is malformed,
    and only as far as there is a choice: KEEP is one forward. A correction is written greedily, ``max_tokens`` + 1 ids
    at most. Each prompt begins with the draft as it was shown before, so its KV is found in the cache and only what is
    new is read; what several rows of a call share (the instructions, a group's task) is read once, too. A draft too
    long for the model or its KV pool has no verdict, Keep("malformed"), and no correction; a warning says so once.
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
        self.engine = Engine({"verifier": model}, tokenizer, **{"block_size": 8} | engine)
        tokenizer = self.engine.tokenizer
        require(tokenizer is not None, "tokenizer", None, "one, for a verifier reads and writes text")
        self.end_id = min(self.engine.models["verifier"].eos_ids, default=None)
        require(self.end_id is not None, "eos_token_id", None, "one, which ends a verdict")
        self.template, self.max_tokens = template or Template(), max_tokens
        self.chat_template_kwargs = chat_template_kwargs
        longest, blocks = self.engine.models["verifier"].max_length, self.engine.num_blocks[0]
        # ids that a prompt and its answer may have
        self.room = min(blocks * self.engine.block_size, longest or 1 << 62)
        self._warned = False
        self.choices = choices or (lambda request: verdict_choices(tokenizer, request, self.end_id))
        self.forget()

    def forget(self) -> None:
        """Drop all cached KV."""
        self.engine.forget()
        self._read: set[int] = set()  # hashes of the tasks that were read since the weights changed
        self._version = self.engine.models["verifier"].version

    def review(self, requests: Sequence[Request]) -> list[Verdict]:
        choices = [self.choices(request) for request in requests]
        prompts = [self.prompt(self.template.verdict_messages(request)) for request in requests]
        said = [_forced(found, ()) for found in choices]
        fits = self._fitting(prompts, max(len(ids) for found in choices for ids in found))
        for wave in self._waves(requests, fits):
            while wave := [i for i in wave if next_ids(choices[i], said[i])]:
                may = [next_ids(choices[i], said[i]) for i in wave]
                written = self._write([prompts[i] + [*said[i]] for i in wave], 1, lambda row, ids, may=may: may[row])
                for i, rollout in zip(wave, written, strict=True):
                    said[i] = _forced(choices[i], (*said[i], *rollout.ids))
        given = [choices[i][said[i]] if i in fits else Keep("malformed") for i in range(len(requests))]
        return [settle(verdict, request) for verdict, request in zip(given, requests, strict=True)]

    def correct(self, requests: Sequence[Request]) -> list[str | None]:
        prompts = [self.prompt(self.template.fix_messages(request)) for request in requests]
        fits = self._fitting(prompts, self.max_tokens + 1)
        found = dict(zip(fits, self._write([prompts[i] for i in fits], self.max_tokens + 1), strict=True))
        return [found[i].text if i in found else None for i in range(len(prompts))]

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of the messages, or of their text where the tokenizer has no chat template."""
        tokenizer, kwargs = self.engine.tokenizer, self.chat_template_kwargs
        text = "\n\n".join(message["content"] for message in messages)
        if not getattr(tokenizer, "chat_template", None):
            return encode_prompt(tokenizer, text + "\n", 0)
        try:
            return encode_prompt(tokenizer, messages, 0, kwargs)
        except TemplateError:  # "System role not supported", as some say
            return encode_prompt(tokenizer, [{"role": "user", "content": text}], 0, kwargs)

    def _fitting(self, prompts: list[list[int]], n: int) -> list[int]:
        """Indices of the prompts that leave room for ``n`` ids."""
        if max(map(len, prompts)) + n > self.room and not self._warned:
            self._warned, longest = True, max(map(len, prompts))
            message = f"verifier: got a draft of {longest} ids, need <= {self.room - n}: such drafts stay unreviewed"
            warnings.warn(message, stacklevel=2)
        return [i for i, ids in enumerate(prompts) if len(ids) + n <= self.room]

    def _waves(self, requests: Sequence[Request], rows: Sequence[int]) -> list[list[int]]:
        """``rows`` in up to three batches, of which each leaves in the cache what several of the next one begin with:
        one row alone before anything was read, then one of each task that is new and stands in several rows."""
        if self._version != self.engine.models["verifier"].version:
            self.forget()
        tasks = {i: hash(requests[i].prompt) for i in rows}
        several = Counter(tasks.values())
        waves: list[list[int]] = [[], [], []]
        for i, task in tasks.items():
            waves[0 if not self._read else 1 if several[task] > 1 and task not in self._read else 2].append(i)
            self._read.add(task)
        return [wave for wave in waves if wave]

    def _write(self, prompts: list[list[int]], n: int, allowed: Callable | None = None) -> list[Rollout]:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=n)
        return self.engine.generate(prompts, sampling=sampling, allowed=allowed) if prompts else []


def _forced(choices: Choices, said: tuple[int, ...]) -> tuple[int, ...]:
    """``said`` and what must follow: up to the next choice, or to the end."""
    while len(may := next_ids(choices, said)) == 1:
        said += tuple(may)
    return said
