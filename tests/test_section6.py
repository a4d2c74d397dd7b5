"""T16: each row of the MInTRL spec's section 6 that the engine decides, by script: exact ids, authors, reviews, cuts.

Policy and verifier say what a row's script tells them, on the real engine. A character is one token; some stand for
a token that writes more, see ``TOKENS``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import fastcollab as fc
from fastcollab.engine import native_scheduler
from fastcollab.model import Model
from fastcollab.schedules import Intervene
from fastcollab.steps import _byte_alphabet
from fastcollab.verifiers import review_by_text

SCHEDULERS = ["python", "native"] if native_scheduler else ["python"]
both = pytest.mark.parametrize("scheduler", SCHEDULERS)
TOKENS = {"|": b"\n\n", "/": b"\n", "α": b".\n\nb", "δ": b".\n\n  ", "ε": b"\nb"}
TOKENS |= {"β": b"\xc3", "γ": b"\xa9\n\nb", "κ": b"\xa9"}  # of an é; $ is the EOS
KEPT, FIX = "a.|b.|c.$", "C.\n\n"


@functools.cache
def vocabulary() -> tuple[PreTrainedTokenizerFast, dict[str, int]]:
    """Single bytes without merges, so that a correction has an id a byte, and the policy's fused ids; by character."""
    letter = {byte: char for char, byte in _byte_alphabet().items()}
    pieces = [bytes([b]) for b in range(256)] + [t for t in TOKENS.values() if len(t) > 1]
    names = {"".join(letter[bytes([b])] for b in piece): n for n, piece in enumerate(pieces, 1)}
    bpe = Tokenizer(models.BPE(names | {"<eos>": 0}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    by_char = {chr(b): b + 1 for b in range(128)} | {c: 1 + pieces.index(t) for c, t in TOKENS.items()} | {"$": 0}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>"), by_char


def ids(text: str) -> list[int]:
    return [vocabulary()[1][char] for char in text]


@dataclass(frozen=True)
class Row:
    """A script and what must come of it.

    ``drafts[k]`` is the whole response as the policy writes it after k corrections (each holds one C); the last is
    what must stand at the end, ``authors`` who wrote it (P, V). ``verdicts``: answers in their order, one a question
    (None: time-out). ``reviews``: (length, outcome). ``cuts``: (position, dropped, inserted).
    """

    drafts: list[str]
    verdicts: list[str | None]
    fixes: list
    authors: str
    reviews: list[tuple[int, str]]
    cuts: list[tuple[int, str, str]] = field(default_factory=list)
    settings: dict = field(default_factory=dict)
    finish: str = "eos"
    limit: int = 40


def kept(verdicts, outcome, fixes=(), **changes):
    """The verdicts on the first chunk of KEPT come to ``outcome``, and the draft stands; the other chunks are kept."""
    reviews = [(3, outcome), (6, "keep"), (9, "keep")]
    return Row([KEPT], [*verdicts, "KEEP", "KEEP"], list(fixes), "P" * 9, reviews, **changes)


def fixed(fix, inserted, settings=None, before=(), draft="a.|b!|", at=3, dropped="b!|", end="d.$"):
    """One correction at ``at``, and the policy writes ``end`` behind it, which is kept."""
    final = draft[:at] + inserted + end
    authors = "P" * at + "V" * len(inserted) + "P" * len(end)
    reviews = [(len(draft), "intervention")]
    cuts = [(at, dropped, inserted)]
    return Row([draft, final], [*before, "REVISE 2"], [fix], authors, reviews, cuts,
               dict(chunk=len(draft), max_reviews=1) | (settings or {}))  # fmt: skip


ROWS = {
    "6.1 no error": kept(["KEEP"], "keep"),
    "6.2 malformed, then a verdict: one review": fixed(FIX, "C.//", before=["I think so"]),
    "6.2 malformed twice": kept(["hm", "REVISE one"], "malformed"),
    "6.2 a step that is no integer": kept(["REVISE 1.0", "REVISE 0"], "malformed"),
    "6.2 time-out": kept([None], "malformed"),
    "6.2 malformed, then time-out": kept(["", None], "malformed"),
    "6.2 a correction that did not come": kept(["REVISE 1"], "unanswered", [None]),
    "6.3 an accepted step": Row(
        [KEPT], ["KEEP", "REVISE 1", "REVISE 2"], [], "P" * 9, [(3, "keep"), (6, "out_of_range"), (9, "out_of_range")]
    ),
    "6.3 deep: an accepted step": Row(
        [KEPT, "a.|C.//d.|e.|f.$"], ["KEEP", "KEEP", "REVISE 2", "REVISE 1", "REVISE 2"], [FIX],
        "PPPVVVVPPPPPPPPP", [(3, "keep"), (6, "keep"), (9, "intervention"), (13, "out_of_range"), (16, "out_of_range")],
        [(3, "b.|c.$", "C.//")], dict(rollback="deep"),
    ),
    "6.3 deep: back to just after the last correction": Row(
        ["a.|b.|", "C.//d.|e.|f.|", "C.//C!//g.$"], ["REVISE 1", "KEEP", "REVISE 2"], [FIX, "C!\n\n"],
        "VVVVVVVVPPP", [(3, "intervention"), (10, "keep"), (13, "intervention")],
        [(0, "a.|", "C.//"), (4, "d.|e.|f.|", "C!//")], dict(rollback="deep"),
    ),
    "6.4 beyond the chunk": kept(["REVISE 2"], "out_of_range"),
    "6.5 the very first step": Row(
        ["a!|", "C.//b.$"], ["REVISE 1"], [FIX], "VVVVPPP", [(3, "intervention")], [(0, "a!|", "C.//")]
    ),
    "6.5 the first step of a later chunk": Row(
        ["a.|b!|", "a.|C.//d.$"], ["KEEP", "REVISE 2"], [FIX], "PPPVVVVPPP", [(3, "keep"), (6, "intervention")],
        [(3, "b!|", "C.//")],
    ),
    "6.6 inside a token, text beyond": fixed(FIX, "//C.//", draft="aαb!|", at=1, dropped="αb!|"),
    "6.6 inside a token, whitespace beyond": fixed(FIX, "C.//", draft="aδb!|", at=2, dropped="b!|"),
    "6.6 inside a character": fixed(FIX, "//C.//", draft="aβγb!|", at=1, dropped="βγb!|"),
    "6.6 a whole character": fixed(FIX, "C.//", draft="aβκ|b!|", at=4, dropped="b!|"),
    "6.6 what was dropped is not shown again": Row(
        ["aαb!|", "a//C.//d.|e.$"], ["REVISE 2", "KEEP"], [FIX], "PVVVVVVPPPPPP",
        [(5, "intervention"), (13, "keep")], [(1, "αb!|", "//C.//")], dict(chunk=5),
    ),
    "6.7 too long: the last sentence": fixed("Cx. yz yz", "Cx. ", dict(max_tokens=6)),
    "6.7 too long: the last step": fixed("Cx\n\nyz. u", "Cx//", dict(max_tokens=6)),
    "6.7 too long, no end": fixed("Cxyzxyz", "Cxyzxy", dict(max_tokens=6)),
    "6.7 just as long": fixed("Cxyzxy", "Cxyzxy", dict(max_tokens=6)),
    "6.8 empty": kept(["REVISE 1"], "noop", [""]),
    "6.8 whitespace": kept(["REVISE 1"], "noop", [" \n\n\t"]),
    "6.8 the dropped text": kept(["REVISE 1"], "noop", ["a.\n\n"]),
    "6.8 the dropped ids": kept(["REVISE 1"], "noop", [ids("a.|")]),
    "6.9 nothing but markers": kept(["REVISE 1"], "noop", ["<|im_end|><eos>"]),
    "6.9 nothing but EOS": kept(["REVISE 1"], "noop", [[0, 0]]),
    "6.9 markers": fixed("<|im_start|>assistant\nC.<|im_end|>\nx", "C."),
    "6.9 the policy's EOS as text": fixed("C.<eos>x", "C."),
    "6.9 EOS among ids": fixed([*ids("C."), 0, *ids("x")], "C."),
    "6.10 the answer": kept(["REVISE 1"], "leak", ["C \\boxed{7}."]),
    "6.10 another answer": fixed("C \\boxed{8}.", "C \\boxed{8}."),
    "6.11 EOS discarded": Row(
        ["a.|b!$", "a.|C.//d.$"], ["KEEP", "REVISE 2"], [FIX], "PPPVVVVPPP", [(3, "keep"), (6, "intervention")],
        [(3, "b!$", "C.//")],
    ),
    "6.11 EOS alone in its chunk": Row(
        ["a.|$", "a.|C.//d.$"], ["KEEP", "REVISE 2"], [FIX], "PPPVVVVPPP", [(3, "keep"), (4, "intervention")],
        [(3, "$", "C.//")],
    ),
    "6.11 EOS, and a correction that is rejected": Row(
        ["a.|b.$"], ["KEEP", "REVISE 2"], ["\n"], "P" * 6, [(3, "keep"), (6, "noop")]
    ),
    "6.12 the limit": Row(
        ["a.|b.|c."], ["KEEP", "KEEP"], [], "P" * 8, [(3, "keep"), (6, "keep")], finish="length", limit=8
    ),
    "6.12 the limit where a chunk ends": Row(
        ["a.|b.|"], ["KEEP"], [], "P" * 6, [(3, "keep")], finish="length", limit=6
    ),
    "6.11 EOS where the limit is": Row(
        ["a.|b.$"], ["KEEP", "KEEP"], [], "P" * 6, [(3, "keep"), (6, "keep")], finish="eos", limit=6
    ),
    "6.13 no room": Row([KEPT], ["REVISE 1", "KEEP", "KEEP"], [FIX], "P" * 9, [(3, "room"), (6, "keep"), (9, "keep")],
                        settings=dict(reserve=6), limit=9),
    "6.13 just enough room": Row(["a!|", "C.//b.|cd"], ["REVISE 1"], [FIX], "VVVVPPPPP", [(3, "intervention")],
                                 [(0, "a!|", "C.//")], dict(reserve=5, max_reviews=1), finish="length", limit=9),
    "6.13 up to the limit": Row(["a.|b!|", "a.|C.//"], ["KEEP", "REVISE 2"], [FIX], "PPPVVVV",
                                [(3, "keep"), (6, "intervention")], [(3, "b!|", "C.//")], finish="length", limit=7),
    "6.14 no review left": Row([KEPT], ["KEEP"], [], "P" * 9, [(3, "keep")], settings=dict(max_reviews=1)),
    "6.14 no correction left": Row(
        ["a!|", "C.//b.|c.|d.$"], ["REVISE 1"], [FIX], "VVVVPPPPPPPPP", [(3, "intervention")], [(0, "a!|", "C.//")],
        dict(max_interventions=1),
    ),
    "6.14 a malformed review is one": Row(
        [KEPT], ["hm", "hm"], [], "P" * 9, [(3, "malformed")], settings=dict(max_reviews=1)
    ),
    "6.14 a rejected correction is none": Row(
        [KEPT, "a.|C.//d.$"], ["REVISE 1", "REVISE 2"], ["", FIX], "PPPVVVVPPP", [(3, "noop"), (6, "intervention")],
        [(3, "b.|", "C.//")], dict(max_interventions=1),
    ),
    "6.15 the cap": Row(
        ["a!|", "C.//b.|c.|d.$"], ["REVISE 1", "REVISE 3", "KEEP"], [FIX, FIX], "VVVVPPPPPPPPP",
        [(3, "intervention"), (10, "cap"), (13, "keep")], [(0, "a!|", "C.//")], dict(cap=0.25, max_tokens=4), limit=20,
    ),
    "6.16 right after a correction": Row(
        ["a!|", "C.//b!|c.|d.$"], ["REVISE 1", "REVISE 2", "KEEP"], [FIX], "VVVVPPPPPPPPP",
        [(3, "intervention"), (10, "out_of_range"), (13, "keep")], [(0, "a!|", "C.//")],
    ),
    "6.16 after a new step": Row(
        ["a!|", "C.//b.|c!|", "C.//b.|C!//d.|e.$"], ["REVISE 1", "REVISE 3", "KEEP"], [FIX, "C!\n\n"],
        "VVVVPPPVVVVPPPPPP", [(3, "intervention"), (10, "intervention"), (17, "keep")],
        [(0, "a!|", "C.//"), (7, "c!|", "C!//")],
    ),
    "6.17 text is encoded on its own": fixed("C.\n\nx", "C.//x"),
    "6.17 ids of the policy's own vocabulary stay": fixed(ids("Cα|"), "Cα|"),
    "6.17 what no id writes": kept(["REVISE 1"], "encoding", ["C \ud800"]),
    "6.18 the separator is there": fixed(" \n\n C.", "C."),
    "6.18 half of it is there": fixed(FIX, "/C.//", draft="a./εc!|", at=3, dropped="εc!|"),
    "6.18 none: exactly one": fixed("\n\n\n\n" + FIX, "//C.//", draft="aαb!|", at=1, dropped="αb!|"),
    "6.19 no correction": Row(
        ["a.|b.|$"], ["KEEP", "KEEP", "KEEP"], [], "P" * 7, [(3, "keep"), (6, "keep"), (7, "keep")]
    ),
}  # fmt: skip


class Scripted:
    """Verdicts and corrections of each row, by its prompt, in their order; verdicts are read as a model's are."""

    def __init__(self, rows: dict[str, Row]) -> None:
        self.verdicts = {prompt: list(row.verdicts) for prompt, row in rows.items()}
        self.fixes = {prompt: list(row.fixes) for prompt, row in rows.items()}
        self.shown = {prompt: [] for prompt in rows}
        self.kept = {prompt: [] for prompt in rows}

    def review(self, requests):
        for r in requests:
            self.shown[r.prompt].append("".join(r.accepted + r.new))
        return review_by_text(lambda asked: [self.verdicts[r.prompt].pop(0) for r in asked], requests)

    def correct(self, requests):
        for r in requests:
            self.kept[r.prompt].append("".join(r.accepted))
        return [self.fixes[r.prompt].pop(0) for r in requests]


@functools.cache
def policy():
    special = dict(eos_token_id=0, pad_token_id=None, bos_token_id=None)
    return Model("policy", tiny_model("qwen3", vocab_size=len(vocabulary()[0]), **special))


def engine(scheduler, **changes):
    settings = dict(kv_memory="8MiB", block_size=4, scheduler=scheduler) | changes
    return fc.Engine({"policy": policy()}, tokenizer=vocabulary()[0], **settings)


def run(e, names, n=1, mixed=None, behind_what_stands=False):
    """The rollouts of rows with the same settings, in one batch."""
    rows = {f"{name}?": ROWS[name] for name in names}
    drafts, (first, *_) = [[ids(d) for d in row.drafts] for row in rows.values()], rows.values()
    mark, verifier = ids("C")[0], Scripted(rows)

    def allowed(group, written):
        draft = drafts[group][written.count(mark)]
        return [draft[len(written)] if len(written) < len(draft) else 0]

    settings = dict(chunk=3, longest_chunk=30, max_tokens=16, reserve=0) | first.settings
    plan, sampling = Intervene(verifier=verifier, **settings), fc.SamplingParams(max_new_tokens=first.limit)
    schedule = plan if mixed is None else [plan if own else fc.Solo("policy") for own in mixed]
    columns = [{"answer": "7"}] * len(rows)
    found = e.generate(list(rows), n, schedule, sampling, seed=1, rows=columns, allowed=allowed)
    assert not any(verifier.verdicts.values()) and not any(verifier.fixes.values())
    for (prompt, row), texts in zip(rows.items(), drafts, strict=True):
        done = np.cumsum([0] + [outcome == "intervention" for _, outcome in row.reviews])
        stood = [texts[k][:length] for k, (length, _) in zip(done, row.reviews, strict=False)]
        assert verifier.shown[prompt] == [e.tokenizer.decode(x, skip_special_tokens=True) for x in stood]
        asked = [outcome for _, outcome in row.reviews if outcome not in ("keep", "malformed", "out_of_range")]
        kept = [text for text, outcome in zip(verifier.kept[prompt], asked, strict=True) if outcome == "intervention"]
        stood = [e.tokenizer.decode(texts[k][:at]) for k, (at, _, _) in enumerate(row.cuts)]
        assert not behind_what_stands or kept == stood
    return found


def check(r, row):
    assert r.ids == ids(row.drafts[-1])
    assert "".join("PV"[a] for a in r.author) == row.authors and r.writers == ("policy", "verifier")
    assert [tuple(review) for review in r.reviews] == row.reviews
    assert [tuple(cut) for cut in r.interventions] == [
        (at, tuple(ids(dropped)), tuple(ids(inserted))) for at, dropped, inserted in row.cuts
    ]
    assert r.finish == row.finish and r.text == vocabulary()[0].decode(r.ids, skip_special_tokens=True)
    places = [draw.position for draw in r.draws]
    assert places == sorted(set(places)) and places[0] == 0 and places[-1] < max(1, len(r.ids))
    assert np.isnan(r.logprob).tolist() == [a == "V" for a in row.authors]


@both
@pytest.mark.parametrize("name", ROWS)
def test_each_row(name, scheduler):
    (r,) = run(engine(scheduler), [name])
    check(r, ROWS[name])


@both
def test_6_12_an_eos_that_is_ignored_ends_nothing(scheduler):
    """At the limit there is no review, whatever id stands there."""
    plan = Intervene(verifier=Scripted({"x?": Row([], ["KEEP"], [], "", [])}), chunk=3, max_tokens=16, reserve=0)
    draft, sampling = ids("a.|b.$"), fc.SamplingParams(max_new_tokens=6, ignore_eos=True)
    (r,) = engine(scheduler).generate(["x?"], 1, plan, sampling, allowed=lambda group, written: [draft[len(written)]])
    assert r.ids == draft and r.finish == "length" and [tuple(x) for x in r.reviews] == [(3, "keep")]


@both
def test_a_correction_is_asked_for_behind_what_stands(scheduler):
    """2.2: it continues the kept prefix, without what a straddling token took along."""
    for name in (name for name, row in ROWS.items() if row.cuts):
        run(engine(scheduler), [name], behind_what_stands=True)


@both
def test_rows_in_one_batch(scheduler):
    """Rows are cut, wait and end at different times beside each other, a control rollout of each between them."""
    names = [name for name, row in ROWS.items() if not row.settings and row.limit == 40]
    assert len(names) > 15
    found = run(engine(scheduler, token_budget=24), names, 2, mixed=[False, True])
    for name, control, reviewed in zip(names, found[::2], found[1::2], strict=True):
        check(reviewed, ROWS[name])
        assert control.writers == ("policy",) and not control.reviews and not control.interventions
        own = ids(ROWS[name].drafts[0])
        assert control.ids == own + [0] * (len(control.ids) - len(own))


@both
def test_6_23_log_probs_are_of_the_full_softmax_at_the_temperature(scheduler):
    """Cut or not, before and behind a correction: what the policy's token has in a fresh forward of the final ids."""
    rows = {f"{n}?": Row([], ["REVISE 1", "KEEP"] + ["KEEP"] * 9, [FIX], "", []) for n in range(6)}
    plan = Intervene(verifier=Scripted(rows), chunk=5, longest_chunk=5, max_tokens=8, reserve=0, max_interventions=1)
    sampling = fc.SamplingParams(temperature=0.7, max_new_tokens=24)
    found = engine(scheduler).generate(list(rows), 1, plan, sampling, seed=3)
    assert all(len(r.interventions) == 1 for r in found)
    for r in found:
        with torch.no_grad():
            z = policy().module(torch.tensor([r.prompt_ids + r.ids])).logits[0, len(r.prompt_ids) - 1 : -1]
        want = (z / 0.7).log_softmax(-1).gather(1, torch.tensor(r.ids)[:, None])[:, 0].numpy()
        np.testing.assert_allclose(r.logprob[r.author == 0], want[r.author == 0], atol=2e-5)
