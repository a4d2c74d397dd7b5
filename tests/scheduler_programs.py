"""Random programs over schedulers in lock step, with the KV content that each plan would write and read."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from fastcollab import scheduler as oracle
from fastcollab.reference.random import philox

VOCABULARY = 9


class Content:
    """The pools as tags. A slot's tag says which model version ingested which ids up to and including its own."""

    def __init__(self, num_blocks, block_size) -> None:
        self.block_size = block_size
        self.tags = [np.full(n * block_size, -1, np.int64) for n in num_blocks]
        self.version = [0] * len(num_blocks)

    def forward(self, m: int, plan, scheduler) -> None:
        """Copy, append, then read back: every row must find exactly its own ids under its block table."""
        blocks = self.tags[m].reshape(-1, self.block_size)
        for source, target in plan.copies:
            blocks[target] = blocks[source]
        expected = []
        for r, row in enumerate(plan.rows.tolist()):
            a, b, end = plan.q_indptr[r], plan.q_indptr[r + 1], plan.kv_len[r]
            prompt, response, _ = scheduler.view(row)
            ids = np.concatenate([prompt, response])[:end].tolist()
            assert plan.input_ids[a:b].tolist() == ids[end - (b - a) :]
            assert plan.position_ids[a:b].tolist() == list(range(end - (b - a), end))
            tag, tags = hash((m, self.version[m])), []
            for i in ids:
                tag = hash((tag, i))
                tags.append(tag)
            self.tags[m][plan.slot_mapping[a:b]] = tags[end - (b - a) :]
            expected.append(tags)
        for r, tags in enumerate(expected):
            slots = plan.block_table[r][:, None] * self.block_size + np.arange(self.block_size)
            assert self.tags[m][slots.reshape(-1)[: len(tags)]].tolist() == tags, f"row {plan.rows[r]} reads foreign KV"


def same(a, b) -> bool:
    """Equality of what schedulers return: arrays with their dtype and shape, NaN equal to NaN."""
    if isinstance(a, np.ndarray):
        nan = a.dtype.kind == "f"
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b, equal_nan=nan)
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


class LockStep:
    """One oracle and any number of other schedulers, driven and compared call by call."""

    def __init__(self, classes, num_blocks, block_size, token_budget, costs, prefix_cache) -> None:
        arguments = num_blocks, block_size, token_budget, costs, prefix_cache
        self.all = [c(*arguments) for c in classes]
        self.oracle = next(s for s in self.all if isinstance(s, oracle.Scheduler))
        self.content = [Content(num_blocks, block_size) for _ in classes]
        self.num_blocks, self.models = num_blocks, range(len(num_blocks))
        self.plans: dict[int, list] = {}  # of each model, the pending plan of every scheduler
        self.unread: set[int] = set()  # models whose pending forward has not run
        self.seen = Counter()
        self.clock = 0.0

    def call(self, name: str, *arguments):
        """The common result of one method, or None where all raise the same error."""
        results = [self._attempt(s, name, arguments) for s in self.all]
        for other in results[1:]:
            assert same(results[0], other), (name, arguments, results[0], other)
        self.seen[name] += 1
        self.check()
        if isinstance(results[0], str):
            self.seen[results[0].split(": got")[0]] += 1
            return None
        return results[0]

    @staticmethod
    def _attempt(scheduler, name, arguments):
        try:
            return getattr(scheduler, name)(*arguments)
        except (ValueError, KeyError, AssertionError) as error:
            return f"{type(error).__name__}: {error}"

    def plan(self, m: int) -> None:
        pool = self.oracle.pools[m]
        cached = {b for b in pool.free if pool.published[b]}
        started = {i for i, r in self.oracle.rows.items() if not r.table[m]}
        ready = self.oracle.ready(m)
        first, *others = self.plans[m] = [s.plan(m) for s in self.all]
        for other in others:
            assert same(first, other), (first, other)
        self.unread.add(m)
        self.check()
        starts = first.kv_len - np.diff(first.q_indptr)
        self.seen["plan"] += 1
        self.seen["evicted"] += sum(not pool.published[b] for b in cached)
        self.seen["chunked"] += len(first.rows) - len(first.sample_rows)
        self.seen["left out"] += len(first.rows) < ready
        self.seen["moved nothing"] += ready > 0 == len(first.rows)
        new = [start for row, start in zip(first.rows.tolist(), starts, strict=True) if row in started]
        self.seen["shared tail"] += sum(start % pool.block_size > 0 for start in new)

    def forward(self, m: int) -> None:
        if m in self.unread:
            self.unread.discard(m)
            for scheduler, content, plan in zip(self.all, self.content, self.plans[m], strict=True):
                content.forward(m, plan, scheduler)

    def commit(self, m: int, ids) -> None:
        self.forward(m)
        self.clock += 0.25
        plan = self.plans.pop(m)[0]
        self.call("commit", m, np.array(ids, np.int64), -np.arange(len(plan.sample_rows), dtype=np.float32), self.clock)

    def reset(self) -> None:
        self.plans.clear()
        self.unread.clear()
        self.call("reset")

    def invalidate(self, m: int) -> None:
        for content in self.content:
            content.version[m] += 1
        self.call("invalidate", m)

    def check(self) -> None:
        """Everything visible agrees, and the oracle's books balance."""
        first = self.all[0]
        for other in self.all[1:]:
            for name in ("counters", "latencies"):
                assert getattr(first, name) == getattr(other, name), name
            for name in ("unfinished", "asking", "next_models"):
                assert getattr(first, name)() == getattr(other, name)(), name
            for m in self.models:
                for name in ("ready", "ref_counts", "free_blocks"):
                    assert getattr(first, name)(m) == getattr(other, name)(m), (name, m)
            for i in self.oracle.rows:
                assert first.row_kv_len(i) == other.row_kv_len(i)
                assert [first.row_table(i, m) for m in self.models] == [other.row_table(i, m) for m in self.models]
                assert same(first.view(i), other.view(i))
        rows, size = self.oracle.rows.values(), self.oracle.block_size
        for m, pool in enumerate(self.oracle.pools):
            assert Counter(b for r in rows for b in r.table[m]) == {b: n for b, n in enumerate(pool.ref) if n}
            assert set(pool.free) == {b for b, n in enumerate(pool.ref) if n == 0}
            assert {p: b for b, ps in enumerate(pool.published) for p in ps} == pool.entries
            for r in rows:
                assert r.kv_len[m] < len(r.ids)
                assert r.busy or len(r.table[m]) == -(-r.kv_len[m] // size)

    def drain(self, rng: random.Random) -> None:
        """As an engine would: run until no row is left, take all, find every block free."""
        for m in list(self.plans):
            self.commit(m, tokens(rng, len(self.plans[m][0].sample_rows)))
        for _ in range(3000):
            for i in self.call("asking"):
                self.call("set_author", i, rng.randrange(len(self.oracle.rows[i].policy.models)))
            for m in self.call("next_models"):
                self.plan(m)
                count = len(self.plans[m][0].sample_rows)
                moved = len(self.plans[m][0].rows)
                self.commit(m, tokens(rng, count))
                if moved:
                    break
            else:
                break
        assert self.call("unfinished") == 0
        for i in list(self.oracle.rows):
            self.take(i)
        for m, n in enumerate(self.num_blocks):
            assert self.call("free_blocks", m) == n

    def take(self, i: int) -> None:
        record = self.call("take", i)
        if record is not None:
            self.seen[oracle.FINISH[record.finish]] += 1
            self.seen.update(oracle.REASONS[reason] for _, reason, _ in record.draws)


def tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(n)]


def add_policies(run: LockStep, rng: random.Random) -> int:
    """Solo, word, chunk, ask and ask at boundaries, over random models; returns how many."""
    boundary = np.array([rng.random() < 0.3 for _ in range(VOCABULARY - 1)], np.uint8)  # the last id lies beyond it
    for kind, mask, gap, first in (
        (oracle.CYCLE, None, 0, 0),
        (oracle.DRAW, boundary, 6, -1),
        (oracle.DRAW, boundary, 0, 0),
        (oracle.DRAW, None, 1, -1),
        (oracle.CYCLE, None, rng.randint(1, 4), 0),
        (oracle.ASK, None, 0, -1),
        (oracle.ASK, boundary, 5, -1),
    ):
        writers = 1 if mask is None and not gap and kind == oracle.CYCLE else rng.randint(2, 3)
        models = [rng.choice(run.models) for _ in range(writers)]
        cumulative = tuple(np.cumsum([1 / writers] * writers).tolist())
        eos = (0,) if rng.random() < 0.7 else (0, 1)
        run.call("add_policy", kind, models, cumulative, mask, gap, first, eos)
    return 7


def program(classes, seed: int, length: int) -> Counter:
    """``length`` random calls and the drain after them; returns how often each kind of event occurred."""
    rng = random.Random(seed)
    size, longest, extra = rng.choice([1, 2, 3, 4, 8]), rng.choice([6, 14, 22]), 12
    one = -(-(longest + extra - 1) // size)
    num_blocks = [one + rng.choice([0, 1, one, 2 * one]) for _ in range(rng.randint(1, 3))]
    costs = [rng.choice([1.0, 2.0, 5.0]) for _ in num_blocks]
    run = LockStep(classes, num_blocks, size, rng.choice([3, 8, 20, 1000]), costs, rng.random() < 0.8)
    policies = add_policies(run, rng)
    stem = tokens(rng, longest)
    prompts = [stem[: rng.randint(1, longest)] for _ in range(3)]
    prompts += [(p + tokens(rng, longest))[: rng.randint(1, longest)] for p in prompts]
    texts = [stem]  # that rows had, perhaps before they were cut: their blocks may be found in the cache

    def add():
        group, policy = rng.randrange(len(prompts)), rng.randrange(policies)
        known = rng.choice(texts)[: rng.randint(1, longest)]
        for _ in range(rng.choice([1, 1, 4])):
            prompt = rng.choice([prompts[group], prompts[group], known])
            key = rng.getrandbits(64) - (1 << 63)
            run.call("add", prompt, key, group, rng.randint(1, extra), policy, rng.random() < 0.3)

    def step():
        m = rng.choice(run.models)
        if m in run.plans:
            run.commit(m, tokens(rng, len(run.plans[m][0].sample_rows)))
        else:
            run.plan(m)
            if rng.random() < 0.5:  # else the forward comes late, after other calls
                run.forward(m)

    def some():
        return rng.choice(list(run.oracle.rows)) if run.oracle.rows and rng.random() < 0.98 else 10**6

    def cut():
        i = some()
        r = run.oracle.rows.get(i)
        if r:
            texts.append(list(r.ids))
        run.call("truncate", i, rng.randint(r.prompt_len, len(r.ids)) if r and rng.random() < 0.95 else 0)

    def force():
        i = some()
        r = run.oracle.rows.get(i)
        writer = rng.randrange(len(r.policy.models)) if r and rng.random() < 0.95 else 7
        run.call("append_forced", i, tokens(rng, rng.randint(0, 5)), writer)

    def answer():
        asking = run.call("asking")
        i = rng.choice(asking) if asking and rng.random() < 0.95 else some()
        run.call("set_author", i, rng.randint(0, 2) if rng.random() < 0.95 else -1)

    def forget():
        m = rng.choice(run.models)
        if m not in run.plans:
            run.invalidate(m)

    actions = {add: 6, step: 60, cut: 4, force: 3, answer: 10, forget: 0.5, run.reset: 0.3}
    actions[lambda: run.call("fork", some(), rng.getrandbits(63))] = 2
    actions[lambda: run.call("finish", some(), rng.choice([oracle.STOP, oracle.ABORT]))] = 1
    actions[lambda: run.take(some())] = 6
    for action in rng.choices(list(actions), list(actions.values()), k=length):
        if len(run.oracle.rows) > 14:
            action = rng.choice([step, lambda: run.take(some())])
        action()
    run.drain(rng)
    for name in ("preemptions", "copies", "cached", "catch_up", "handoffs"):
        run.seen[name] += sum(run.oracle.counters[name])
    return run.seen


def noise_model(plan, scheduler) -> list[int]:
    """Tokens 0..15 that are functions of the row alone, as sampled ones are."""
    draws = zip(plan.key.tolist(), plan.position.tolist(), plan.epoch.tolist(), strict=True)
    return [philox(key, 0, position, epoch, 0)[0] % 16 for key, position, epoch in draws]


def write_all(s, blocks, token_of=noise_model, content=None) -> dict[int, oracle.Record]:
    """Write all rows to their end, checking the KV that each forward reads; returns the records by row."""
    content, records = content or Content(blocks, s.block_size), {}
    for _ in range(10_000):
        for m in s.next_models():
            plan = s.plan(m)
            content.forward(m, plan, s)
            ended = s.commit(m, token_of(plan, s), np.zeros(len(plan.sample_rows), np.float32))
            records.update((i, s.take(i)) for i in ended.tolist())
            if len(plan.rows):
                break
        else:
            break
    assert s.unfinished() == 0
    assert [s.free_blocks(m) for m in range(s.num_models)] == blocks
    return records
