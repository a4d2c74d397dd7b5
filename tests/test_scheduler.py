"""The schedulers: C++ and Python in lock step over random programs, and each alone against what must hold."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scheduler_programs import Content, noise_model, program, write_all

from fastcollab import scheduler as oracle
from fastcollab.scheduler import ABORT, ASK, CYCLE, DRAW, FINISH, REASONS

try:
    from fastcollab import _scheduler as native
except ImportError as error:
    native, absent = None, f"the compiled scheduler is absent: {error}"

CASES = {c["id"]: c for c in json.loads((Path(__file__).parent / "cases.json").read_text())}
CLASSES = [oracle.Scheduler] if native is None else [oracle.Scheduler, native.Scheduler]


@pytest.fixture(params=["python", "native"])
def scheduler(request):
    """The class under test."""
    if request.param == "native" and native is None:
        pytest.skip(absent)
    return oracle.Scheduler if request.param == "python" else native.Scheduler


def solo(s, **kwargs) -> int:
    return s.add_policy(CYCLE, (0,), first=0, **kwargs)


def step(s, ids, m=0):
    """One plan and its commit; returns the plan."""
    plan = s.plan(m)
    s.commit(m, ids, [0.0] * len(ids))
    return plan


# -- random programs


EVENTS = (
    "add append_forced commit fork finish invalidate plan reset set_author take truncate "
    "preemptions copies cached catch_up handoffs evicted chunked "
    "eos length stop abort start boundary gap call"
).split() + ["left out", "moved nothing", "shared tail"]


@pytest.mark.parametrize("part", range(4))
def test_random_programs(part):
    """Equal plans, tables, books, records and errors over >= 10,000 calls; no row ever reads foreign or stale KV."""
    seen = Counter()
    for i in range(13):
        seen += program(CLASSES, 100 * part + i, 160 if i else 800)  # the long one outgrows the row table
    assert sum(seen[name] for name in EVENTS[:11]) >= 2_600
    assert {name: seen[name] for name in EVENTS if not seen[name]} == {}
    if native is None:
        pytest.skip(f"the oracle alone was run, {absent}")


# -- sharing


def test_fork_copies_the_shared_tail_once(scheduler):
    """Case C36: two forks of a half-filled block, the parent released, tokens written in turn."""
    case, expected = CASES["C36"]["input"], CASES["C36"]["expected"]
    prefix, blocks = case["prefix"], [case["pool_pages"]]
    s = scheduler(blocks, case["page_size"])
    content = Content(blocks, case["page_size"])
    parent = s.add(prefix, 1, 0, 10, solo(s))
    content.forward(0, s.plan(0), s)
    s.commit(0, [0], [0.0])
    s.truncate(parent, len(prefix))
    rows = [s.fork(parent, 2), s.fork(parent, 3)]
    s.finish(parent)
    for a, b in [*zip(case["fork_A"], case["fork_B"], strict=True), (0, 0)]:  # one more feeds the last ones
        content.forward(0, s.plan(0), s)
        s.commit(0, [a, b], [0.0, 0.0])
    texts = [np.concatenate(s.view(i)[:2])[:-1].tolist() for i in rows]
    assert texts == [expected["A_tokens"], expected["B_tokens"]]
    assert s.ref_counts(0)[s.row_table(rows[0], 0)[0]] == expected["refcount_first_page"]
    assert s.row_table(rows[0], 0)[0] == s.row_table(rows[1], 0)[0]
    assert s.free_blocks(0) == expected["free_pages"] == blocks[0] - expected["used_pages"]
    assert s.counters["copies"] == [1]
    s.finish(rows[0])
    assert s.free_blocks(0) == expected["free_after_releasing_A"]
    s.finish(rows[1])
    assert s.free_blocks(0) == expected["free_after_releasing_both"]


@pytest.mark.parametrize("swap", [False, True])
def test_fully_cached_prompt_still_feeds_its_last_token(scheduler, swap):
    """Case C38: each prompt twice; the second run computes one token, and reads what the first one wrote."""
    case, most = CASES["C38"]["input"], CASES["C38"]["expected"]["max_cached_on_second"]
    prompts = case["prompts"][::-1] if swap else case["prompts"]
    cached = {}
    for prompt in prompts:
        s, content = scheduler([8], case["page_size"]), Content([8], case["page_size"])
        policy = solo(s)
        for _ in range(2):
            s.add(prompt, 5, 0, 3, policy)
            write_all(s, [8], content=content)
        cached[len(prompt)] = s.counters["cached"][0]  # by the second: the first found nothing
        assert s.counters["tokens"][0] == (len(prompt) + 2) + (1 + 2)
    assert cached == {9: most["9_tokens"], 8: 7}

    s, content = scheduler([16], case["page_size"]), Content([16], case["page_size"])
    policy, cached = solo(s), [0]
    for prompt in prompts * 2:  # in one pool they share: whole blocks that leave a token to feed, and equal tails
        s.add(prompt, 5, 0, 1, policy)
        write_all(s, [16], content=content)
        cached.append(s.counters["cached"][0])
    assert np.diff(cached).tolist() == ([0, 8, 7, 8] if swap else [0, 4, 8, 7])


def test_group_waits_for_its_leader(scheduler):
    s = scheduler([32], 4)
    prompt, policy = list(range(10)), solo(s)
    rows = [s.add(prompt, i, 7, 5, policy) for i in range(4)]
    other = s.add([3, 3, 3], 9, 8, 5, policy)
    assert step(s, [1, 1]).rows.tolist() == [rows[0], other]
    plan = s.plan(0)
    assert plan.rows.tolist() == [*rows, other]
    assert np.diff(plan.q_indptr).tolist() == [1] * 5
    assert s.counters["cached"] == [27]
    assert [s.ref_counts(0)[b] for b in s.row_table(rows[0], 0)[:2]] == [4, 4]
    assert plan.copies.tolist() == [[s.row_table(rows[0], 0)[2], s.row_table(i, 0)[2]] for i in rows[1:]]


def test_invalidated_kv_is_never_reused(scheduler):
    s = scheduler([16, 16], 4)
    policy = s.add_policy(CYCLE, (0, 1), max_gap=1, first=0)
    rows = [s.add(list(range(9)), i, 0, 8, policy) for i in range(2)]
    for _ in range(5):
        m = s.next_models()[0]
        plan = s.plan(m)
        s.commit(m, [5] * len(plan.sample_rows), [0.0] * len(plan.sample_rows))
    before = s.row_kv_len(rows[0])
    s.invalidate(1)
    assert s.row_kv_len(rows[0]) == [before[0], 0]
    assert s.free_blocks(1) == 16
    for i in rows:
        s.finish(i)
    s.add(list(range(9)), 1, 0, 8, s.add_policy(CYCLE, (1,), first=0))
    assert s.plan(1).q_indptr.tolist() == [0, 9]


# -- room


@pytest.mark.parametrize("sampled", [False, True])
def test_preemption_changes_nothing(scheduler, sampled):
    """Case C40, with its toy model and with draws keyed by row and position."""
    case, expected = CASES["C40"]["input"], CASES["C40"]["expected"]

    def toy(plan, s):
        return [(3 * int(plan.input_ids[i]) + int(plan.position_ids[i]) + 1) % 11 for i in plan.logit_index]

    outputs = []
    for pages in (case["pool_pages"], 4, 100):
        s = scheduler([pages], case["page_size"])
        policy = solo(s)
        rows = [s.add(p, 10 + i, i, case["new_tokens"], policy) for i, p in enumerate(case["prompts"])]
        records = write_all(s, [pages], noise_model if sampled else toy)
        assert (s.counters["preemptions"][0] >= 1) == (pages == case["pool_pages"])
        assert [len(records[i].logprob) for i in rows] == expected["logprob_counts"]
        outputs.append([records[i].ids[len(p) :].tolist() for i, p in zip(rows, case["prompts"], strict=True)])
    assert outputs[0] == outputs[1] == outputs[2]
    assert sampled or outputs[0] == expected["outputs"]


def test_a_row_in_a_pending_plan_is_not_preempted(scheduler):
    s = scheduler([8, 3], 4)
    old = s.add([1, 2, 3], 0, 0, 9, s.add_policy(CYCLE, (1,), first=0))
    young = s.add([4, 5, 6, 7], 0, 1, 5, s.add_policy(CYCLE, (1, 0), max_gap=1, first=0))
    assert step(s, [9, 9], 1).rows.tolist() == [old, young]
    assert s.plan(0).rows.tolist() == [young]
    while s.row_kv_len(old)[1] < 8:
        assert step(s, [9], 1).rows.tolist() == [old]
    assert step(s, [], 1).rows.tolist() == [], "no third block while the young row's are in use: the old one waits"
    assert (s.counters["preemptions"], s.row_kv_len(young)) == ([0, 1], [0, 4])
    s.commit(0, [9], [0.0])
    assert step(s, [9], 1).input_ids.tolist() == [9]
    assert (s.counters["preemptions"], s.row_kv_len(young)) == ([1, 2], [0, 0])


def test_long_prompts_are_fed_in_chunks(scheduler):
    s = scheduler([8], 4, token_budget=4)
    s.add(list(range(10)), 1, 0, 3, solo(s))
    plans = [step(s, []), step(s, []), step(s, [5])]
    assert [p.input_ids.tolist() for p in plans] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [len(p.sample_rows) for p in plans] == [0, 0, 1]


def test_next_models_weighs_rows_by_cost(scheduler):
    s = scheduler([64, 64, 64], 4, costs=[4.0, 1.0, 1.0])
    policies = [s.add_policy(CYCLE, (m,), first=0) for m in range(3)]
    for m, count in enumerate((8, 2, 3)):
        for i in range(count):
            s.add([1, 2], i, i, 4, policies[m])
    assert s.next_models() == [2, 0, 1]
    assert [s.ready(m) for m in range(3)] == [8, 2, 3]


# -- authors


BOUNDARY = np.zeros(16, np.uint8)
BOUNDARY[[2, 5, 11]] = 1


def word(s, p=0.5, max_gap=6, **kwargs) -> int:
    return s.add_policy(DRAW, (0, 1), (p, 1.0), BOUNDARY, max_gap, **kwargs)


def test_draws_only_at_boundaries_or_gaps(scheduler):
    s = scheduler([400, 400], 4)
    policy = word(s)
    for i in range(40):
        s.add([1, 2, 3], i, i, 60, policy)
    reasons = Counter()
    for record in write_all(s, [400, 400]).values():
        response, drawn = record.ids[3:], {t: (reason, writer) for t, reason, writer in record.draws}
        last = 0
        for t in range(len(response)):
            due = "start" if t == 0 else "boundary" if BOUNDARY[response[t - 1]] else "gap" if t - last == 6 else None
            assert (REASONS[drawn[t][0]] if t in drawn else None) == due
            last = t if due else last
            assert record.author[t] == drawn[last][1]
            reasons[due] += 1
    assert min(reasons[r] for r in ("start", "boundary", "gap", None)) > 30


def test_a_row_is_the_same_in_any_batch(scheduler):
    def written(keys, blocks, budget):
        s = scheduler(blocks, 4, budget)
        policy = word(s)
        rows = {s.add([k % 7] * 9, k, k % 7, 24, policy): k for k in keys}
        records = write_all(s, blocks)
        return {k: records[i] for i, k in rows.items()}, s.counters

    alone = {k: written([k], [8, 8], 1000)[0][k] for k in range(-8, 8)}
    for keys, blocks, budget in ((range(-8, 8), [200, 200], 1000), (range(7, -9, -1), [17, 12], 11)):
        together, counters = written(keys, blocks, budget)
        assert blocks == [200, 200] or min(counters["preemptions"]) > 0
        for k, record in together.items():
            assert all(np.array_equal(a, b) for a, b in zip(record, alone[k], strict=True))


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_share_of_the_writers(scheduler, p):
    s = scheduler([2, 2], 4)
    policy = s.add_policy(DRAW, (0, 1), (p, 1.0), max_gap=1)
    draws = []
    for key in range(3000):
        i = s.add([1], key, 0, 4, policy)
        s.finish(i)
        draws += [writer for _, _, writer in s.take(i).draws]
    share = draws.count(0) / len(draws)
    assert abs(share - p) <= 3 * (p * (1 - p) / len(draws)) ** 0.5


def test_cycle_counts_per_row(scheduler):
    s = scheduler([64, 64], 4)
    policy = s.add_policy(CYCLE, (0, 1), max_gap=3, first=1)
    for i in range(3):
        s.add([1] * (i + 1), i, i, 8, policy)
    assert [r.author.tolist() for r in write_all(s, [64, 64]).values()] == [[1, 1, 1, 0, 0, 0, 1, 1]] * 3


def test_asked_authors(scheduler):
    s = scheduler([16, 16], 4)
    i = s.add([1, 2], 0, 0, 4, s.add_policy(ASK, (0, 1)))
    for writer in (1, 1, 0, 1):
        assert s.asking() == [i] and s.next_models() == []
        s.set_author(i, writer)
        assert s.asking() == [] and s.next_models() == [writer]
        step(s, [3], writer)
    record = s.take(i)
    assert record.author.tolist() == [1, 1, 0, 1]
    assert record.draws == [(t, REASONS.index("call"), w) for t, w in enumerate((1, 1, 0, 1))]


# -- interventions


def test_truncate_rewinds_the_author_and_the_kv(scheduler):
    s = scheduler([64, 64], 4)
    policy, content = word(s), Content([64, 64], 4)
    i = s.add([1, 2, 3], 11, 0, 30, policy)

    def write(until):
        while len(s.view(i)[1]) < until:
            (m,) = s.next_models()
            plan = s.plan(m)
            content.forward(m, plan, s)
            s.commit(m, noise_model(plan, s), [0.0])

    write(25)
    before = s.view(i)
    for keep in (24, 13, 3, 20):
        s.truncate(i, min(keep, 3 + len(s.view(i)[1])))
        assert max(s.row_kv_len(i)) < keep
        assert s.view(i)[1].tolist() == before[1][: keep - 3].tolist()
        write(25)
        assert all(np.array_equal(a, b) for a, b in zip(s.view(i), before, strict=True))


def test_forced_text_begins_an_epoch(scheduler):
    s = scheduler([16, 16], 4)
    i = s.add([1, 2, 3], 11, 0, 9, s.add_policy(CYCLE, (0, 1), first=0))
    step(s, [4]), step(s, [5]), step(s, [6])
    s.truncate(i, 4)
    s.append_forced(i, [8, 9], 1)
    plan = s.plan(0)
    assert (plan.input_ids.tolist(), plan.position_ids.tolist()) == ([4, 8, 9], [3, 4, 5])
    assert (plan.epoch.tolist(), plan.position.tolist()) == ([1], [3])
    s.commit(0, [7], [-0.5])
    s.finish(i)
    record = s.take(i)
    assert record.ids.tolist() == [1, 2, 3, 4, 8, 9, 7]
    assert record.author.tolist() == [0, 1, 1, 0]
    assert np.isnan(record.logprob).tolist() == [False, True, True, False]
    assert FINISH[record.finish] == "abort"


def test_truncate_wakes_a_row_unless_it_stays_ended(scheduler):
    s = scheduler([8], 4)
    policy = solo(s, eos=(9,))
    full, ended = s.add([1] * 13, 0, 0, 3, policy), s.add([2], 0, 1, 3, policy)
    step(s, [4, 4]), step(s, [4, 9]), step(s, [4])
    assert s.unfinished() == 0
    s.truncate(full, 16)
    s.truncate(ended, 3)
    assert s.unfinished() == 0, "the limit and the EOS still end them"
    s.truncate(full, 15)
    s.truncate(ended, 2)
    assert s.ready(0) == 2


def test_reset_keeps_finished_blocks_in_the_cache(scheduler):
    s = scheduler([8], 4)
    policy = solo(s)
    first = s.add(list(range(9)), 0, 0, 4, policy)
    step(s, [1])
    s.plan(0)
    s.reset()
    assert (s.unfinished(), s.free_blocks(0), s.next_models()) == (0, 8, [])
    with pytest.raises(KeyError):
        s.view(first)
    s.add(list(range(9)), 0, 0, 4, policy)
    assert s.plan(0).input_ids.tolist() == [8]


# -- errors


def test_errors_name_value_and_need(scheduler):
    s = scheduler([4, 2], 4)
    policy, both, ask = solo(s), s.add_policy(CYCLE, (0, 1), max_gap=1, first=0), s.add_policy(ASK, (0, 1))
    small = r"kv_memory: got 2 blocks of 4 tokens for model 1, need >= 3 for one row of 5 \+ 5 tokens"
    with pytest.raises(ValueError, match=small):
        s.add([1] * 5, 0, 0, 5, both)
    s.add([1] * 5, 0, 0, 4, both)
    i, asks = s.add([1, 2, 3], 0, 1, 3, policy), s.add([1], 0, 2, 2, ask)
    with pytest.raises(ValueError, match=rf"set_author: got row {i}, need a row that asks"):
        s.set_author(i, 0)
    with pytest.raises(ValueError, match=r"set_author: got writer 2, need 0\.\.1"):
        s.set_author(asks, 2)
    for keep in (2, 4):
        with pytest.raises(ValueError, match=rf"truncate: got keep={keep}, need 3\.\.3"):
            s.truncate(i, keep)
    with pytest.raises(ValueError, match=r"append_forced: got 4 ids, need <= 3 on a running row"):
        s.append_forced(i, [1] * 4, 0)
    with pytest.raises(ValueError, match=r"append_forced: got writer 1, need 0\.\.0"):
        s.append_forced(i, [1], 1)
    with pytest.raises(ValueError, match=rf"take: got row {i} still running, need an ended row"):
        s.take(i)
    s.plan(0)
    for call, *arguments in ((s.truncate, 3), (s.append_forced, [1], 0), (s.fork, 1), (s.finish, ABORT)):
        with pytest.raises(ValueError, match=rf"got row {i} inside a pending plan, need a committed one"):
            call(i, *arguments)
    with pytest.raises(AssertionError):
        s.plan(0)
    with pytest.raises(AssertionError):
        s.invalidate(0)
    with pytest.raises(IndexError):
        s.commit(0, [1], [0.0])
    with pytest.raises(KeyError, match="99"):
        s.truncate(99, 1)
