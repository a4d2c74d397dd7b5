"""The local-model verifier: verdicts against whole logits, a cache that is used, interventions by a model."""

from __future__ import annotations

import os
import re

import pytest
import torch

import fastcollab as fc
from fastcollab.model_verifier import ModelVerifier
from fastcollab.schedules import Intervene
from fastcollab.verifiers import Keep, Request, Revise, Template, next_ids, settle

PROMPTS = [row["prompt"] for row in fc.tiny.problems(4, seed=3)]
LINES = re.compile("\n")


def verifier(**changes):
    """The tiny senior, which can't write KEEP: a digit says it, 0 to keep and n to revise step n - 1."""
    short = dict(template=Template(system="check"))  # the model's limit is 256 tokens
    made = ModelVerifier(fc.tiny.senior(), **short | {"kv_memory": "16MiB", "block_size": 4} | changes)
    digit = [made.engine.tokenizer.convert_tokens_to_ids(str(n)) for n in range(10)]

    def choices(request):
        said = {(digit[0], made.end_id): Keep()}
        return said | {(digit[1 + n], made.end_id): Revise(n) for n in range(min(9, len(request.new)))}

    made.choices = choices
    return made, choices


REQUESTS = [
    Request(PROMPTS[0], (), ("\n 1 + 1 = 2\n",)),
    Request(PROMPTS[1], ("\n 3 + 4 = 7\n",), (" 5 + 5 = 10\n", " 1 + 2 = 3\n")),
    Request(PROMPTS[2], (), ("\n 3 + 4 = 8\n", " 2 + 2 = 4\n", " answer 48")),
]


def test_a_verdict_is_the_greedy_one_of_those_that_may_be_given():
    made, choices = verifier()
    found = made.review(REQUESTS)
    module, tokenizer = made.engine.models["verifier"].module, made.engine.tokenizer
    for request, verdict in zip(REQUESTS, found, strict=True):
        text = tokenizer.apply_chat_template(made.template.verdict_messages(request), tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = module(torch.tensor([ids])).logits[0, -1]
        allowed = choices(request)
        best = max(allowed, key=lambda said: float(logits[said[0]]))
        assert verdict == allowed[best]
    assert made.review(REQUESTS) == found


def test_what_was_read_of_a_draft_is_not_read_again():
    """The second review of a longer draft reads its new steps and the question; the correction's prompt too."""
    made, _ = verifier()
    made.review(REQUESTS[:1])
    grown = Request(PROMPTS[0], REQUESTS[0].new, (" 2 + 2 = 4\n",))
    made.engine.reset_stats()
    made.review([grown])
    stats, whole = made.engine.stats(), made.engine.tokenizer(made.template.context(grown, grown.accepted))["input_ids"]
    assert stats["cached"] >= len(whole) - 2 * 4  # all but what shares a block with what follows
    made.engine.reset_stats()
    made.correct([grown.cut(0)])
    assert made.engine.stats()["cached"] >= len(whole) - 2 * 4


def test_a_model_intervenes_in_the_rollouts_of_another():
    made, _ = verifier(max_tokens=8, template=Template(None, "check", "?", "go on"))  # its limit is 256 tokens
    one = made.engine.tokenizer.convert_tokens_to_ids("1")
    made.choices = lambda request: {(one, made.end_id): Revise(0)}  # no other verdict may be given
    plan = Intervene(verifier=made, chunk=6, longest_chunk=24, max_tokens=8, reserve=2, steps=LINES,
                     leaks=lambda text, row: False)  # fmt: skip
    engine = fc.Engine({"policy": fc.tiny.junior()}, kv_memory="16MiB")
    sampling = fc.SamplingParams(max_new_tokens=40)
    rollouts = engine.generate(PROMPTS, n=2, schedule=plan, sampling=sampling, seed=1)
    again = engine.generate(PROMPTS, n=2, schedule=plan, sampling=sampling, seed=1)
    assert [r.ids for r in rollouts] == [r.ids for r in again] and sum(len(r.interventions) for r in rollouts) > 0
    for r in rollouts:
        for log in r.interventions:
            own = slice(log.position, log.position + len(log.inserted))
            assert tuple(r.ids[own]) == log.inserted and (r.author[own] == 1).all() and 0 < len(log.inserted) <= 8
    assert made.engine.stats()["forwards"] > 0


def test_a_model_that_cannot_say_the_verdicts_is_refused_by_name():
    made = ModelVerifier(fc.tiny.senior(), kv_memory="16MiB")
    with pytest.raises(ValueError, match="tokenizer: got \"one that cannot write \\['KEEP'"):
        made.review(REQUESTS[:1])
    with pytest.raises(ValueError, match="max_tokens: got 0, need >= 1"):
        ModelVerifier(fc.tiny.senior(), max_tokens=0)


def test_allowed_ids_bound_every_draw():
    engine = fc.Engine({"policy": fc.tiny.senior()}, kv_memory="8MiB")
    eos = min(engine.models["policy"].eos_ids)

    def allowed(group, ids):
        return [5 + group, 9] if len(ids) < 4 else [eos]

    rollouts = engine.generate(PROMPTS[:2], n=3, sampling=fc.SamplingParams(max_new_tokens=9), seed=0, allowed=allowed)
    for r in rollouts:
        assert set(r.ids[:4]) <= {5 + r.group, 9} and r.ids[4:] == [eos] and r.finish == "eos"
        assert r.logprob[4] == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(ValueError, match="allowed ids of prompt 0: got \\[\\], need at least one"):
        engine.generate(PROMPTS[:1], allowed=lambda group, ids: [])


def test_a_draft_that_does_not_fit_stays_unreviewed():
    """It raised, hours into a run, and again at each resume; a verdict that no longer fitted was a KeyError."""
    for changes in (dict(kv_memory="200KiB"), {}):
        made, choices = verifier(**changes)
        room = made.room
        if not changes:
            assert room == made.engine.models["verifier"].max_length
        size = len(made.prompt(made.template.verdict_messages(REQUESTS[0])))
        for more in range(room - size - 4, room - size + 4):
            long = Request(PROMPTS[0], ("\n" + "1" * more,), REQUESTS[0].new)
            fits = len(made.prompt(made.template.verdict_messages(long))) + 2 <= room
            made._warned = True
            assert (made.review([long, REQUESTS[0]])[0] == Keep("malformed")) == (not fits)
            assert made.review([long, REQUESTS[0]])[1] == made.review(REQUESTS[:1])[0]
        made._warned, long = False, Request(PROMPTS[0], ("\n" + "1" * room,), REQUESTS[0].new)
        with pytest.warns(UserWarning, match="verifier: got a draft of .* ids, need <= "):
            assert made.review([long]) == [Keep("malformed")] and made.correct([long]) == [None]


def test_a_chat_template_without_a_system_role():
    made, _ = verifier()
    made.engine.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    system, user = (m["content"] for m in made.template.verdict_messages(REQUESTS[0]))
    assert made.engine.tokenizer.decode(made.prompt(made.template.verdict_messages(REQUESTS[0]))) == (
        made.engine.tokenizer.decode(made.engine.tokenizer(f"user: {system}\n\n{user}\n")["input_ids"])
    )
    assert made.review(REQUESTS[:1])


def test_a_verdict_is_written_only_as_far_as_there_is_a_choice():
    """KEEP is one forward, REVISE two: the rest of either must follow. It is the verdict that writing it out gives."""
    made, _ = verifier()
    a, b, c, d = (made.engine.tokenizer.convert_tokens_to_ids(str(n)) for n in range(4))
    keep = {(a, c, c, made.end_id): Keep()}
    revise = {(b, d, i, made.end_id): Revise(n) for n, i in enumerate((a, b, c))}
    for found, forwards in (keep | revise, {1, 2}), (revise, {1}), (keep, {0}):
        made.choices = lambda request, found=found: found
        for request in REQUESTS:
            made.engine.reset_stats()
            (verdict,) = made.review([request])
            (whole,) = made.engine.generate(
                [made.prompt(made.template.verdict_messages(request))],
                sampling=fc.SamplingParams(temperature=0.0, max_new_tokens=4),
                allowed=lambda row, ids, found=found: next_ids(found, ids),
            )
            said = found[tuple(whole.ids)]
            spent = made.engine.stats()["forwards"] - 4
            assert verdict == settle(said, request) and spent in forwards
            assert len(forwards) == 1 or spent == (1 if said == Keep() else 2)


def test_what_rows_of_a_call_share_is_read_once():
    """The instructions, and the task of a group: one row of it goes ahead."""
    made, _ = verifier(template=Template(system="check this draft, if you please: " * 4))
    requests = [Request(PROMPTS[i // 2], (), (f"\n {i} + 1 = 2\n",)) for i in range(6)]
    made.review(requests)
    stats, size = made.engine.stats(), made.engine.block_size
    prompts = [made.prompt(made.template.verdict_messages(r)) for r in requests]
    apart = len(prompts[0])
    for prompt, earlier in ((prompts[i], prompts[:i]) for i in range(1, 6)):
        apart += len(prompt) - max(len(os.path.commonprefix([prompt, p])) for p in earlier) + size
    assert stats["tokens"] <= apart < 0.6 * sum(map(len, prompts))
    made.engine.reset_stats()
    made.review(requests[::-1])
    assert made.engine.stats()["forwards"] == 1  # they are known: nobody has to go ahead
    made.forget()
    made.review(requests)
    assert made.engine.stats()["forwards"] == 1 + 3
