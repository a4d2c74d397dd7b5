"""The scheduler, in readable Python: the oracle of the C++ one's tests, and the fallback where no compiler was.

A state machine over rows. It owns tokens, authors, KV blocks, author draws and limits. ``plan(m)`` emits the flat
arrays of one forward of model ``m``; ``commit(m, ...)`` applies what was sampled. Per row and model, KV is valid for
exactly ``kv_len`` leading ids, and ``len(table) == ceil(kv_len / block_size)`` between a commit and the next plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fastcollab.blocks import BlockPool
from fastcollab.reference.random import author_uniform
from fastcollab.schedules import ASK, CYCLE, DRAW  # how the next author is chosen

__all__ = ["ASK", "CYCLE", "DRAW", "Plan", "Policy", "Record", "Scheduler"]

START, BOUNDARY, GAP, CALL = 0, 1, 2, 3  # why it was chosen
REASONS = ("start", "boundary", "gap", "call")
RUNNING, EOS, LENGTH, STOP, ABORT = 0, 1, 2, 3, 4  # state, or why the row ended
FINISH = (None, "eos", "length", "stop", "abort")


@dataclass(frozen=True)
class Policy:
    """Who writes next, as data. ``models[w]`` is the model that writer ``w`` speaks through."""

    kind: int  # DRAW | CYCLE | ASK
    models: tuple[int, ...]
    cumulative: tuple[float, ...] = (1.0,)  # of the writers' probabilities
    boundary: np.ndarray | None = None  # uint8 [V]: ids after which the author is chosen anew
    max_gap: int = 0  # the same after this many tokens without a choice; 0 is never
    first: int = -1  # writer of the first token; -1 draws
    eos: tuple[int, ...] = ()  # ids that end a row, whoever writes them


class Plan(NamedTuple):
    """One forward: R rows, T new tokens, S of them yield a logit row (the last token of a row that will speak)."""

    rows: np.ndarray  # int64 [R]
    input_ids: np.ndarray  # int64 [T]
    position_ids: np.ndarray  # int64 [T]
    q_indptr: np.ndarray  # int32 [R + 1]
    kv_len: np.ndarray  # int32 [R], after the append
    block_table: np.ndarray  # int32 [R, B]
    slot_mapping: np.ndarray  # int32 [T]
    copies: np.ndarray  # int64 [P, 2], (source, destination) blocks, to be copied before the forward, in order
    logit_index: np.ndarray  # int64 [S], into T
    sample_rows: np.ndarray  # int64 [S], row ids
    key: np.ndarray  # int64 [S], the rows' random keys
    position: np.ndarray  # int32 [S], response position of the token to draw
    epoch: np.ndarray  # int32 [S]


class Record(NamedTuple):
    """A row, as ``take`` returns it."""

    ids: np.ndarray  # int32, prompt and response
    author: np.ndarray  # uint8, per response token
    logprob: np.ndarray  # fp32, per response token
    draws: list[tuple[int, int, int]]  # (response position, reason, writer)
    finish: int


@dataclass
class Row:
    ids: list[int]
    prompt_len: int
    key: int
    group: int
    max_len: int  # prompt and response
    policy: Policy
    ignore_eos: bool
    kv_len: list[int]
    table: list[list[int]]
    author: list[int] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    draws: list[tuple[int, int, int]] = field(default_factory=list)
    epoch: int = 0
    asking: bool = False
    busy: bool = False  # in a plan that is not committed
    state: int = RUNNING
    last_time: float = 0.0  # clock of the last commit

    @property
    def model(self) -> int:
        return self.policy.models[self.draws[-1][2]] if self.draws else -1

    @property
    def length(self) -> int:
        return len(self.ids) - self.prompt_len


class Scheduler:
    """See the module docstring. Models are numbered; ``costs[m]`` weighs one forward of model m (its weight bytes)."""

    def __init__(self, num_blocks, block_size=16, token_budget=8192, costs=None, prefix_cache=True):
        self.num_models = len(num_blocks)
        self.block_size = block_size
        self.token_budget = token_budget
        self.costs = list(costs) if costs is not None else [1.0] * self.num_models
        self.prefix_cache = prefix_cache
        self.pools = [BlockPool(n, block_size) for n in num_blocks]
        self.policies: list[Policy] = []
        self.rows: dict[int, Row] = {}
        self.next_id = 0
        self.pending: list[list[tuple[int, int]]] = [[] for _ in num_blocks]
        self.latencies: list[float] = []
        self.counters = {
            name: [0] * self.num_models
            for name in ("forwards", "tokens", "sampled", "catch_up", "cached", "handoffs", "preemptions", "copies")
        }

    def add_policy(self, kind, models, cumulative=(1.0,), boundary=None, max_gap=0, first=-1, eos=()) -> int:
        self.policies.append(Policy(kind, tuple(models), tuple(cumulative), boundary, max_gap, first, tuple(eos)))
        return len(self.policies) - 1

    def add(self, prompt, key, group, max_new, policy, ignore_eos=False) -> int:
        """Queue a row; returns its id. Raises ValueError if a pool could not hold it even alone."""
        p = self.policies[policy]
        need = -(-(len(prompt) + max_new - 1) // self.block_size)
        for m in set(p.models):
            if need > len(self.pools[m].ref):
                raise ValueError(
                    f"kv_memory: got {len(self.pools[m].ref)} blocks of {self.block_size} tokens for model {m}, "
                    f"need >= {need} for one row of {len(prompt)} + {max_new} tokens"
                )
        m = self.num_models
        kv_len, table = [0] * m, [[] for _ in range(m)]
        row = Row(list(map(int, prompt)), len(prompt), key, group, len(prompt) + max_new, p, ignore_eos, kv_len, table)
        self.rows[self.next_id] = row
        self.next_id += 1
        self._choose_author(row)
        return self.next_id - 1

    # -- planning

    def ready(self, m: int) -> int:
        """Rows that wait for model ``m`` to speak."""
        return sum(r.state == RUNNING and not r.asking and not r.busy and r.model == m for r in self.rows.values())

    def next_models(self) -> list[int]:
        """Models with ready rows, the one whose forward yields most rows per weight byte first."""
        ready = [(self.ready(m) / self.costs[m], -m) for m in range(self.num_models)]
        return [-m for score, m in sorted(ready, reverse=True) if score > 0]

    def asking(self) -> list[int]:
        """Rows of an ASK policy that wait for ``set_author``."""
        return [i for i, r in self.rows.items() if r.asking and r.state == RUNNING]

    def plan(self, m: int) -> Plan:
        """The next forward of model ``m``: rows by age, each with its lag or a chunk of it, within the token budget."""
        assert not self.pending[m], "plan(m) before the last plan of m was committed"
        budget, copies, planned, prefilling = self.token_budget, [], [], set()
        older, full = 0, False  # older rows that hold blocks here; True once a row could not start
        for i, r in list(self.rows.items()):  # dicts keep insertion order: oldest first
            holds = bool(r.table[m])
            if r.state == RUNNING and not r.asking and not r.busy and r.model == m and (holds or not full):
                if budget == 0:
                    break
                cached = [] if holds else self._cached(r, m)
                known = r.kv_len[m] + sum(k for _, k in cached)
                if self.prefix_cache and known < r.prompt_len - 1:
                    if not holds and r.group in prefilling:
                        continue  # another row of the group computes this prompt right now
                    prefilling.add(r.group)
                for block, k in cached:
                    self.pools[m].share(block)
                    r.table[m].append(block)
                    r.kv_len[m] += k
                n = min(len(r.ids) - r.kv_len[m], budget)
                if self._reserve(i, r, m, n, 0 if holds else older, copies):
                    if not holds:
                        self.counters["cached"][m] += r.kv_len[m]
                    r.busy = True
                    budget -= n
                    planned.append((i, n))
                elif holds:
                    self._preempt(i)
                    break
                else:
                    self._release(r, m)
                    full = True
            older += bool(r.table[m])
        self.pending[m] = planned
        return self._emit(m, planned, copies)

    def _cached(self, r: Row, m: int) -> list[tuple[int, int]]:
        """Blocks (and the tokens used of each) that hold leading ids of ``r``; the last id is always left to feed."""
        entries, size, found = self.pools[m].entries, self.block_size, []
        limit = len(r.ids) - 1 if self.prefix_cache else 0
        end = 0
        while end + size <= limit and tuple(r.ids[: end + size]) in entries:
            end += size
            found.append((entries[tuple(r.ids[:end])], size))
        tail = r.prompt_len - 1
        if end < tail < end + size and tail <= limit and tuple(r.ids[:tail]) in entries:
            found.append((entries[tuple(r.ids[:tail])], tail - end))
        return found

    def _reserve(self, i: int, r: Row, m: int, n: int, spare: int, copies: list) -> bool:
        """Give ``r`` the blocks for ``n`` more tokens, preempting younger rows, the youngest first, while it must.

        A row that starts leaves ``spare`` blocks: one for each older row to grow into. False if there is no room.
        """
        pool, size, start = self.pools[m], self.block_size, r.kv_len[m]
        while True:
            shared = start % size > 0 and pool.ref[r.table[m][-1]] > 1
            need = -(-(start + n) // size) - len(r.table[m]) + shared
            if len(pool.free) >= need + spare:
                break
            victim = max((j for j, v in self.rows.items() if v.table[m] and not v.busy), default=-1)
            if victim <= i or len(pool.free) >= need:
                return False
            self._preempt(victim)
        if shared:
            source, target = r.table[m][-1], pool.allocate()
            copies.append((source, target))
            pool.release(source)
            r.table[m][-1] = target
            self.counters["copies"][m] += 1
        elif start % size:
            pool.unpublish(r.table[m][-1], start % size)
        while len(r.table[m]) * size < start + n:
            r.table[m].append(pool.allocate())
        return True

    def _release(self, r: Row, m: int, keep: int = 0) -> None:
        """Give back the blocks of ``r`` in model ``m`` beyond the first ``keep`` tokens, the last block first."""
        r.kv_len[m] = min(r.kv_len[m], keep)
        while (len(r.table[m]) - 1) * self.block_size >= r.kv_len[m] and r.table[m]:
            self.pools[m].release(r.table[m].pop())

    def _preempt(self, i: int) -> None:
        """Take all blocks of a row; it will replay its own ids, never redraw them."""
        r = self.rows[i]
        for m in range(self.num_models):
            self.counters["preemptions"][m] += bool(r.table[m])
            self._release(r, m)

    def _emit(self, m: int, planned: list[tuple[int, int]], copies: list) -> Plan:
        size = self.block_size
        input_ids, positions, slots, indptr, kv_len, tables, picked = [], [], [], [0], [], [], []
        for i, n in planned:
            r = self.rows[i]
            start, end = r.kv_len[m], r.kv_len[m] + n
            input_ids += r.ids[start:end]
            positions += range(start, end)
            slots += [r.table[m][t // size] * size + t % size for t in range(start, end)]
            indptr.append(indptr[-1] + n)
            kv_len.append(end)
            tables.append(r.table[m])
            if end == len(r.ids):
                picked.append((indptr[-1] - 1, i, r.key, r.length, r.epoch))
            self.counters["catch_up"][m] += sum(
                r.policy.models[r.author[t - r.prompt_len]] != m for t in range(max(start, r.prompt_len), end)
            )
        width = max(map(len, tables), default=0)
        last, sample_rows, key, position, epoch = zip(*picked, strict=True) if picked else ((),) * 5
        self.counters["tokens"][m] += len(input_ids)
        self.counters["forwards"][m] += bool(planned)
        return Plan(
            rows=np.array([i for i, _ in planned], np.int64),
            input_ids=np.array(input_ids, np.int64),
            position_ids=np.array(positions, np.int64),
            q_indptr=np.array(indptr, np.int32),
            kv_len=np.array(kv_len, np.int32),
            block_table=np.array([t + [0] * (width - len(t)) for t in tables], np.int32).reshape(len(tables), width),
            slot_mapping=np.array(slots, np.int32),
            copies=np.array(copies, np.int64).reshape(-1, 2),
            logit_index=np.array(last, np.int64),
            sample_rows=np.array(sample_rows, np.int64),
            key=np.array(key, np.int64),
            position=np.array(position, np.int32),
            epoch=np.array(epoch, np.int32),
        )

    # -- applying

    def commit(self, m: int, ids, logprobs, now: float = 0.0) -> np.ndarray:
        """Apply the S tokens of the pending plan of ``m``; returns the rows (int64) that ended, in order.

        ``now`` is a clock in seconds: a hand-off's latency is the time from the last foreign token to the first own.
        """
        ended, s = [], 0
        for i, n in self.pending[m]:
            r = self.rows[i]
            r.busy = False
            self._publish(r, m, n)
            if r.kv_len[m] < len(r.ids):
                continue
            writer = r.draws[-1][2]
            if r.author and r.author[-1] != writer:
                self.counters["handoffs"][m] += 1
                if r.last_time:  # 0: its only tokens so far were forced, no clock saw them
                    self.latencies.append(now - r.last_time)
            r.ids.append(int(ids[s]))
            r.author.append(writer)
            r.logprob.append(float(logprobs[s]))
            r.last_time = now
            s += 1
            self.counters["sampled"][m] += 1
            self._settle(r)
            if r.state != RUNNING:
                ended.append(i)
        self.pending[m] = []
        return np.array(ended, np.int64)

    def _publish(self, r: Row, m: int, n: int) -> None:
        """Advance kv_len by ``n``; enter the blocks that are full now, and the prompt's partial tail, in the cache."""
        before, size, tail = r.kv_len[m], self.block_size, r.prompt_len - 1
        after = r.kv_len[m] = before + n
        if not self.prefix_cache:
            return
        for end in range((before // size + 1) * size, after + 1, size):
            self.pools[m].publish(tuple(r.ids[:end]), r.table[m][end // size - 1])
        if before < tail <= after and tail % size:
            self.pools[m].publish(tuple(r.ids[:tail]), r.table[m][tail // size])

    def _settle(self, r: Row) -> None:
        """End the row if its last token or its length says so, else choose the next author if it is time."""
        if r.author and r.ids[-1] in r.policy.eos and not r.ignore_eos:
            self._end(r, EOS)
        elif len(r.ids) >= r.max_len:
            self._end(r, LENGTH)
        else:
            self._choose_author(r)

    def _end(self, r: Row, state: int) -> None:
        r.state, r.asking = state, False
        for m in range(self.num_models):
            self._release(r, m)

    def _choose_author(self, r: Row) -> None:
        """Choose the author from response position ``r.length`` on, if that position has a choice and none was made."""
        t, p = r.length, r.policy
        if r.draws and r.draws[-1][0] == t:
            return
        if not r.draws:
            reason = START
        elif p.boundary is not None and r.ids[-1] < len(p.boundary) and p.boundary[r.ids[-1]]:
            reason = BOUNDARY
        elif p.max_gap and t - r.draws[-1][0] >= p.max_gap:
            reason = GAP
        elif p.kind == ASK and p.boundary is None:
            reason = CALL
        else:
            return
        if p.kind == ASK:
            r.asking = True
        elif reason == START and p.first >= 0:
            r.draws.append((t, reason, p.first))
        elif p.kind == CYCLE and reason != START:
            r.draws.append((t, reason, (r.draws[-1][2] + 1) % len(p.models)))
        else:
            u = author_uniform(r.key, t, r.epoch)
            writer = next((w for w, c in enumerate(p.cumulative) if u < c), len(p.models) - 1)
            r.draws.append((t, reason, writer))

    def take_latencies(self) -> list[float]:
        """Latencies of the hand-offs since the last call, in seconds."""
        taken, self.latencies = self.latencies, []
        return taken

    # -- intervening

    def set_author(self, i: int, writer: int) -> None:
        """Answer an asking row."""
        r = self.rows[i]
        if not r.asking:
            raise ValueError(f"set_author: got row {i}, need a row that asks")
        if not 0 <= writer < len(r.policy.models):
            raise ValueError(f"set_author: got writer {writer}, need 0..{len(r.policy.models) - 1}")
        r.draws.append((r.length, CALL, writer))
        r.asking = False

    def truncate(self, i: int, keep: int) -> None:
        """Cut the row to its first ``keep`` ids (prompt counted). It runs on unless these end it; the epoch stays."""
        r = self._idle(i)
        if not r.prompt_len <= keep <= len(r.ids):
            raise ValueError(f"truncate: got keep={keep}, need {r.prompt_len}..{len(r.ids)}")
        del r.ids[keep:], r.author[r.length :], r.logprob[r.length :]
        while r.draws and r.draws[-1][0] > r.length:
            r.draws.pop()
        r.state, r.asking = RUNNING, False
        for m in range(self.num_models):
            self._release(r, m, keep=keep - 1)
        self._settle(r)

    def append_forced(self, i: int, ids, writer: int) -> None:
        """Append foreign ids credited to ``writer``, log-prob NaN, to be ingested by the next forward; a new epoch."""
        r = self._idle(i)
        if r.state != RUNNING or len(r.ids) + len(ids) > r.max_len:
            raise ValueError(f"append_forced: got {len(ids)} ids, need <= {r.max_len - len(r.ids)} on a running row")
        if not 0 <= writer < len(r.policy.models):
            raise ValueError(f"append_forced: got writer {writer}, need 0..{len(r.policy.models) - 1}")
        r.ids += map(int, ids)
        r.author += [writer] * len(ids)
        r.logprob += [float("nan")] * len(ids)
        r.epoch += 1
        self._settle(r)

    def fork(self, i: int, key: int) -> int:
        """A copy of a row that shares all its blocks (copied when either writes) and draws with ``key``; its id."""
        r = self._idle(i)
        copy = Row(list(r.ids), r.prompt_len, key, r.group, r.max_len, r.policy, r.ignore_eos, list(r.kv_len), [])
        copy.table = [list(t) for t in r.table]
        copy.author, copy.logprob, copy.draws = list(r.author), list(r.logprob), list(r.draws)
        copy.epoch, copy.asking, copy.state, copy.last_time = r.epoch, r.asking, r.state, r.last_time
        for m in range(self.num_models):
            for block in copy.table[m]:
                self.pools[m].share(block)
        self.rows[self.next_id] = copy
        self.next_id += 1
        return self.next_id - 1

    def finish(self, i: int, state: int = ABORT) -> None:
        """End a row from outside (STOP or ABORT) and free its blocks."""
        self._end(self._idle(i), state)

    def reset(self) -> None:
        """Drop every row and pending plan (a forward failed); the content cache of finished forwards stays."""
        for r in self.rows.values():
            for m in range(self.num_models):
                self._release(r, m)
        self.rows.clear()
        self.pending = [[] for _ in self.pending]

    def take(self, i: int) -> Record:
        """Remove an ended row and return its record."""
        r = self.rows[i]
        if r.state == RUNNING:
            raise ValueError(f"take: got row {i} still running, need an ended row")
        del self.rows[i]
        author, logprob = np.array(r.author, np.uint8), np.array(r.logprob, np.float32)
        return Record(np.array(r.ids, np.int32), author, logprob, r.draws, r.state)

    def invalidate(self, m: int) -> None:
        """Forget all KV of model ``m`` (its weights changed): cached blocks and what rows hold."""
        assert not self.pending[m], "invalidate(m) with a pending plan"
        self.pools[m].clear()
        for r in self.rows.values():
            self._release(r, m)

    def _idle(self, i: int) -> Row:
        r = self.rows[i]
        if r.busy:
            raise ValueError(f"got row {i} inside a pending plan, need a committed one")
        return r

    # -- looking in

    def unfinished(self) -> int:
        return sum(r.state == RUNNING for r in self.rows.values())

    def view(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Prompt ids (int32), response ids (int32) and authors (uint8) of a row."""
        r = self.rows[i]
        return (
            np.array(r.ids[: r.prompt_len], np.int32),
            np.array(r.ids[r.prompt_len :], np.int32),
            np.array(r.author, np.uint8),
        )

    def row_kv_len(self, i: int) -> list[int]:
        return list(self.rows[i].kv_len)

    def row_table(self, i: int, m: int) -> list[int]:
        return list(self.rows[i].table[m])

    def ref_counts(self, m: int) -> list[int]:
        return list(self.pools[m].ref)

    def free_blocks(self, m: int) -> int:
        return len(self.pools[m].free)
