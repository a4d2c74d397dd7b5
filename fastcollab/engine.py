"""The engine: several models write rollouts together, each with its own paged KV, authors handed off by catch-up."""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from fastcollab import ops
from fastcollab import scheduler as python_scheduler
from fastcollab.attention import PagedContext
from fastcollab.config import SamplingParams, require
from fastcollab.model import Model
from fastcollab.pools import Pools, plan_blocks
from fastcollab.reviews import Draft, Reviews
from fastcollab.sampling import Sampler, content_uid, row_key
from fastcollab.schedules import Call, Intervene, Schedule, Solo
from fastcollab.tokens import StopStrings, check_same_vocabulary, decode, encode_prompt
from fastcollab.types import Draw, Rollout

log = logging.getLogger("fastcollab")

NATIVE_ABSENT: str | None = None  # or why the Python scheduler is used
try:
    from fastcollab import _scheduler as native_scheduler
except ImportError as error:  # absent, or built for another interpreter: both read as absent
    native_scheduler, NATIVE_ABSENT = None, str(error)
    if ops.NATIVE_ABSENT is None:  # else the operators' warning says it
        warnings.warn(f"fastcollab schedules in Python, which is slower: {NATIVE_ABSENT}", stacklevel=2)


class Seat(NamedTuple):
    """Which rollout of a call a row of the scheduler is."""

    group: int
    sample: int
    uid: int
    key: int
    schedule: Schedule


def _scheduler_class(which: str | None):
    which = which or ("python" if os.environ.get("FASTCOLLAB_IMPL") == "reference" else None)
    require(which in (None, "python", "native"), "scheduler", which, "None, python or native")
    if which == "native" and native_scheduler is None:
        raise RuntimeError("scheduler: got 'native', which was not built here; need a C++ compiler at install time")
    return (python_scheduler if which == "python" or native_scheduler is None else native_scheduler).Scheduler


def load_models(models: dict[str, Any], device: Any = None, init_kwargs: dict | None = None) -> dict[str, Model]:
    """Name -> Model from name -> path, module, Model, or ``"base"`` (the one LoRA model with its adapter off)."""
    got = models if models == {} else type(models).__name__
    require(isinstance(models, dict) and len(models) > 0, "models", got, "a dict of name to model or path")
    loaded: dict[str, Model] = {}
    for name, source in models.items():
        if isinstance(source, Model):
            loaded[name] = source
        elif source != "base":
            loaded[name] = Model(name, source, device=device, init_kwargs=init_kwargs)
    for name in models.keys() - loaded.keys():
        adapted = [m for m in loaded.values() if m.peft is not None]
        require(len(adapted) == 1, name, "base", f"exactly one LoRA model beside it (found {len(adapted)})")
        loaded[name] = Model(name, adapted[0].peft, device=device, adapter="off")
    return {name: loaded[name] for name in models}


class Engine:
    """Rollouts of one or several models over one vocabulary.

    ``models``: name -> path, ``PreTrainedModel``, peft model or ``Model``; the user's module is left as it was.
    ``kv_memory`` is what all KV pools take together. Raises ``UnsupportedModelError`` for a model that cannot be
    driven (by name, with the reason) and ``ValueError`` for unequal vocabularies.
    """

    def __init__(
        self,
        models: dict[str, Any],
        tokenizer: Any = None,
        device: Any = None,
        kv_memory: str | int = "1GiB",
        block_size: int = 16,
        token_budget: int = 8192,
        prefix_cache: bool = True,
        scheduler: str | None = None,
    ) -> None:
        require(block_size >= 1, "block_size", block_size, ">= 1")
        require(token_budget >= 1, "token_budget", token_budget, ">= 1")
        self.models = load_models(models, device)
        self.names = list(self.models)
        self.tokenizer, self.vocab_size = self._vocabulary(tokenizer)
        everyone = list(self.models.values())
        blocks = plan_blocks(everyone, kv_memory, block_size)
        self.pools = [Pools(m.layers, n, block_size, m.dtype, m.device) for m, n in zip(everyone, blocks, strict=True)]
        self.block_size, self.num_blocks = block_size, blocks
        costs = [float(m.weight_bytes) for m in everyone]
        self.scheduler = _scheduler_class(scheduler)(blocks, block_size, token_budget, costs, prefix_cache)
        self._versions = [m.version for m in everyone]
        self._policies: dict[Any, int] = {}  # by Schedule.key
        self.reset_stats()

    def _vocabulary(self, tokenizer: Any) -> tuple[Any, int]:
        """The shared tokenizer (or None) and the number of ids that may be sampled: padded heads are sliced."""
        widths = {name: m.vocab_size for name, m in self.models.items()}
        own = {name: m.tokenizer for name, m in self.models.items() if m.tokenizer is not None}
        check_same_vocabulary(own | ({} if tokenizer is None else {"tokenizer": tokenizer}))
        if tokenizer is None and own:
            tokenizer = next(iter(own.values()))
        if tokenizer is None:
            require(len(set(widths.values())) == 1, "models", widths, "one vocabulary size, or tokenizer=")
            return None, next(iter(widths.values()))
        size = max(tokenizer.get_vocab().values()) + 1
        require(min(widths.values()) >= size, "models", widths, f"heads of >= {size} ids, the tokenizer's")
        return tokenizer, size

    # -- generation

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Any],
        n: int = 1,
        schedule: Schedule | Callable | Sequence[Schedule | Callable] | None = None,
        sampling: SamplingParams | None = None,
        seed: int = 0,
        step: int = 0,
        uids: Sequence[int | str] | None = None,
        chat_template_kwargs: dict | None = None,
        skip_special_tokens: bool = True,
        rows: Sequence[dict] | None = None,
        allowed: Callable[[int, list[int]], Sequence[int]] | None = None,
    ) -> list[Rollout]:
        """``len(prompts) * n`` rollouts, prompt-major.

        Draws are keyed by (seed, step, uid or content hash, occurrence of that uid in the call, sample): neither the
        order of the prompts nor the batch changes a row. Without a schedule the first model writes alone; a list of
        ``n`` has one for each sample of a prompt, in one running batch. ``rows`` are the prompts' rows of the dataset,
        which ``Intervene`` shows its verifier. ``allowed(prompt index, ids so far)`` names the ids that may come next,
        at least one: nothing else is drawn, and log-probs are of that smaller law.
        """
        sampling = sampling or SamplingParams()
        require(n >= 1, "n", n, ">= 1")
        several = isinstance(schedule, (list, tuple))
        require(not several or len(schedule) == n, "schedule", several and len(schedule), f"one, or {n} for n={n}")
        schedules = [self._schedule(s) for s in (schedule if several else [schedule] * n)]
        require(not isinstance(prompts, str), "prompts", prompts, "a list of prompts")
        require(len(prompts) > 0, "prompts", list(prompts), "at least one prompt")
        require(uids is None or len(uids) == len(prompts), "uids", uids and len(uids), f"{len(prompts)}, one a prompt")
        if any(isinstance(s, Intervene) for s in schedules):
            plain = not sampling.truncates and not sampling.stop
            require(plain, "sampling", sampling, "neither top-k, top-p, min-p nor stop strings under Intervene")
        if sampling.stop and self.tokenizer is None:
            raise ValueError(f"stop: got {sampling.stop!r} and no tokenizer, need tokenizer= to find text")
        encoded = [encode_prompt(self.tokenizer, p, i, chat_template_kwargs) for i, p in enumerate(prompts)]
        speakers = sorted({name for s in schedules for name in s.speakers})
        limits = [self._limit(ids, i, speakers, sampling.max_new_tokens) for i, ids in enumerate(encoded)]
        require(rows is None or len(rows) == len(prompts), "rows", rows and len(rows), f"{len(prompts)}, one a prompt")
        self._refresh()
        seats, seen = [], Counter()
        for group, ids in enumerate(encoded):
            uid = content_uid(ids if uids is None else uids[group])
            for sample, own in enumerate(schedules):
                seats.append(Seat(group, sample, uid, row_key(seed, step, uid, seen[uid], sample), own))
            seen[uid] += 1
        started = perf_counter()
        try:
            seated: dict[int, Seat] = {}
            drafts: dict[int, Draft] = {}
            for seat in sorted(seats, key=lambda seat: not isinstance(seat.schedule, Intervene)):
                # rows that a verifier reads start first: the others fill the gaps (mintrl 5.5)
                policy, limit = self._policy(seat.schedule), limits[seat.group]
                row = self.scheduler.add(encoded[seat.group], seat.key, seat.group, limit, policy, sampling.ignore_eos)
                seated[row] = seat
                if isinstance(seat.schedule, Intervene):
                    asked, given = prompts[seat.group], {} if rows is None else rows[seat.group]
                    text = asked if isinstance(asked, str) else decode(self.tokenizer, encoded[seat.group])
                    drafts[row] = Draft(text, dict(given))  # a copy: a verifier may write in it
            reviews = self._reviews(seated, drafts, limits, sampling.ignore_eos)
            try:
                mass = self._run(sampling, seated, reviews, allowed)
            finally:
                for each in reviews:
                    each.close()
        except BaseException:
            self.scheduler.reset()
            raise
        self._wall += perf_counter() - started
        found = [
            self._rollout(row, seated[row], encoded, sampling, seed, mass, skip_special_tokens, drafts.get(row))
            for row in sorted(seated, key=lambda row: seated[row][:2])
        ]
        self._lost += sum(r.unread + sum(len(cut.dropped) for cut in r.interventions) for r in found)
        return found

    def _schedule(self, schedule: Schedule | Callable | None) -> Schedule:
        if schedule is None:
            schedule = Solo(self.names[0])
        elif not isinstance(schedule, Schedule):
            if not callable(schedule):
                raise ValueError(f"schedule: got {schedule!r}, need a schedule object or a callable")
            schedule = Call(schedule, tuple(self.names))
        unknown = [w for w in schedule.speakers if w not in self.models]
        require(not unknown, "schedule writers", unknown, f"names among {self.names}")
        return schedule

    def _policy(self, schedule: Schedule) -> int:
        """The scheduler's number of a schedule; made once, for it may scan the vocabulary."""
        if schedule.key not in self._policies:
            models = [self.names.index(w) for w in schedule.speakers]
            eos = sorted({i for w in schedule.speakers for i in self.models[w].eos_ids})
            arguments = schedule.policy(self.tokenizer, self.vocab_size)
            if arguments.get("boundary") is not None:
                count = int(arguments["boundary"].sum())
                log.info("%s: %d of %d ids are boundaries", type(schedule).__name__, count, self.vocab_size)
            self._policies[schedule.key] = self.scheduler.add_policy(models=models, eos=eos, **arguments)
        return self._policies[schedule.key]

    def _limit(self, ids: list[int], index: int, writers: Sequence[str], max_new: int) -> int:
        """How many tokens may follow a prompt: ``max_new``, or what the models' lengths leave."""
        bad = [i for i in ids if not 0 <= i < self.vocab_size]
        require(not bad, f"prompt {index}", bad[:4], f"ids in 0..{self.vocab_size - 1}")
        limit = 1 << 30
        for name in writers:
            longest = self.models[name].max_length
            if longest is not None:
                need = f"< {longest}, the limit of {name!r}"
                require(len(ids) < longest, f"prompt {index}", f"{len(ids)} tokens", need)
                limit = min(limit, longest - len(ids))
        new = min(limit, max_new)
        need, have = -(-(len(ids) + new - 1) // self.block_size), min(self.num_blocks)
        room = f"{need} blocks of {self.block_size} tokens a model, for prompt {index} of {len(ids)} + {new}"
        require(need <= have, "kv_memory", f"{have} blocks", room)
        return new

    def _refresh(self) -> None:
        """Forget the KV of every model whose weights changed since the last call."""
        for m, name in enumerate(self.names):
            version = self.models[name].version
            if version != self._versions[m]:
                self.scheduler.invalidate(m)
                self._versions[m] = version

    def forget(self) -> None:
        """Drop all cached KV (between calls)."""
        for m in range(len(self.names)):
            self.scheduler.invalidate(m)

    def _reviews(
        self, seated: dict[int, Seat], drafts: dict[int, Draft], limits: Sequence[int], ignore_eos: bool
    ) -> list[Reviews]:
        """The reviews of each Intervene schedule of the call."""
        result = []
        for schedule in dict.fromkeys(seated[row].schedule for row in drafts):
            own = {row: draft for row, draft in drafts.items() if seated[row].schedule == schedule}
            stop_ids = sorted(self.models[schedule.speakers[0]].eos_ids)
            room = {row: limits[seated[row].group] for row in own}
            steps = schedule.made_steps(self.tokenizer)
            result.append(Reviews(schedule, self.scheduler, steps, stop_ids, own, room, ignore_eos))
        return result

    def _run(
        self,
        sampling: SamplingParams,
        seated: dict[int, Seat],
        reviews: Sequence[Reviews] = (),
        allowed: Callable | None = None,
    ) -> dict | None:
        """Forwards until no row is left; returns each row's kept masses where the law is truncated."""
        scheduler, sampler = self.scheduler, Sampler(sampling)
        written: dict[int, list[int]] = {row: [] for row in seated}
        mass = {row: [] for row in seated} if sampling.truncates else None
        stops = StopStrings(sampling.stop, lambda ids: decode(self.tokenizer, ids, False)) if sampling.stop else None
        asked = {row: seat.schedule for row, seat in seated.items() if isinstance(seat.schedule, Call)}
        open_reviews = stuck = False
        while scheduler.unfinished() or open_reviews:
            if asked:
                self._ask(asked)
            for each in reviews:
                each.look()
            if reviews:
                idle = stuck or not scheduler.next_models()
                open_reviews, stuck = any([each.move(idle) for each in reviews]), False
            for m in scheduler.next_models():
                plan = scheduler.plan(m)
                if len(plan.rows):
                    break
            else:
                if reviews and (open_reviews or not scheduler.next_models()):
                    stuck = True
                    continue  # verdicts are out, or the last have just come; rows that wait hold the blocks
                raise RuntimeError("engine: no row can move; this is a bug, please report it")
            law = None if allowed is None else self._only(plan, seated, allowed)
            ids, logprob, kept = (t.numpy() for t in self._forward(m, plan, sampler, law))
            if len(ids) and ids.min() < 0:
                s = int(ids.argmin())
                group, sample = seated[int(plan.sample_rows[s])][:2]
                raise FloatingPointError(
                    f"rollout {group}/{sample}: got logits without a finite value or with NaN from "
                    f"{self.names[m]!r} at position {plan.position[s]}, need finite logits"
                )
            ended = scheduler.commit(m, ids, logprob, perf_counter())
            for each in reviews:
                each.end(ended.tolist())
                open_reviews |= bool(each.waiting)
            self._rows_in[m] += len(plan.rows)
            if mass is not None:
                for row, value in zip(plan.sample_rows.tolist(), kept.tolist(), strict=True):
                    mass[row].append(value)
            if stops is not None:
                for row, i in zip(plan.sample_rows.tolist(), ids.tolist(), strict=True):
                    written[row].append(i)
                    if row not in ended and stops.first_hit(written[row], len(written[row]) - 1):
                        scheduler.finish(row, python_scheduler.STOP)
        return mass

    def _only(self, plan, seated: dict[int, Seat], allowed: Callable) -> torch.Tensor:
        """What is added to the logits [S, V] so that only allowed ids can be drawn."""
        law = torch.full((len(plan.sample_rows), self.vocab_size), -torch.inf)
        for s, row in enumerate(plan.sample_rows.tolist()):
            group = seated[row].group
            may = list(allowed(group, self.scheduler.view(row)[1].tolist()))
            require(len(may) > 0, f"allowed ids of prompt {group}", may, "at least one")
            law[s, may] = 0.0
        return law

    def _forward(self, m: int, plan, sampler: Sampler, law: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """One forward of model ``m``: copies, append + attend, head on the rows that speak, one draw each."""
        model, pools = self.models[self.names[m]], self.pools[m]
        device = model.device

        def move(array):
            return torch.from_numpy(array).to(device)

        if len(plan.copies):
            pools.copy(move(plan.copies))
        context = PagedContext(
            pools, move(plan.slot_mapping), move(plan.block_table), move(plan.q_indptr), move(plan.kv_len)
        )
        index = move(plan.logit_index)
        logits = model.decode(move(plan.input_ids), move(plan.position_ids), context, index)[:, : self.vocab_size]
        if law is not None:
            logits = logits + law.to(device)
        return tuple(t.cpu() for t in sampler(logits, plan))

    def _ask(self, schedules: dict[int, Call]) -> None:
        for row in self.scheduler.asking():
            if row in schedules:
                prompt, ids, author = self.scheduler.view(row)
                writer, writers = int(schedules[row].choose(prompt, ids, author)), len(schedules[row].writers)
                require(0 <= writer < writers, "schedule", writer, f"an index in 0..{writers - 1}")
                self.scheduler.set_author(row, writer)

    def _rollout(self, row, seat: Seat, encoded, sampling, seed, mass, skip, draft: Draft | None) -> Rollout:
        record = self.scheduler.take(row)
        prompt, schedule = encoded[seat.group], seat.schedule
        ids = record.ids[len(prompt) :].tolist()
        text = decode(self.tokenizer, ids, skip)
        finish = python_scheduler.FINISH[record.finish]
        if finish == "stop":
            text = StopStrings(sampling.stop, None).cut(text)
        return Rollout(
            prompt_ids=list(prompt),
            ids=ids,
            author=record.author,
            writers=schedule.writers,
            logprob=record.logprob,
            finish=finish,
            draws=[Draw(t, python_scheduler.REASONS[reason], writer) for t, reason, writer in record.draws],
            interventions=draft.interventions if draft else [],
            reviews=draft.reviews if draft else [],
            unread=draft.unread if draft else 0,
            text=text,
            uid=seat.uid,
            group=seat.group,
            sample=seat.sample,
            seed=seed,
            policy_version=self.models[schedule.speakers[0]].version,
            kept_mass=None if mass is None else np.array(mass[row], np.float32),
        )

    # -- figures

    def reset_stats(self) -> None:
        """Start the figures of ``stats`` anew."""
        self._wall, self._lost, self._rows_in = 0.0, 0, [0] * len(self.names)
        self._before = {k: list(v) for k, v in self.scheduler.counters.items()}
        self.scheduler.take_latencies()
        self._latencies: list[float] = []

    def stats(self) -> dict[str, Any]:
        """Figures since the last ``reset_stats``: totals, and per model under its name.

        ``tokens`` were fed, ``sampled`` drawn, ``catch_up`` are foreign tokens ingested, ``cached`` prompt tokens not
        computed; ``occupancy`` is rows a forward; ``handoff_latency_ms`` the median from the last foreign token to
        the first own; ``tokens_per_s`` sampled tokens that no verifier took away, over the
        wall time of ``generate``.
        """
        counters = {
            k: [now - then for now, then in zip(v, self._before[k], strict=True)]
            for k, v in self.scheduler.counters.items()
        }
        self._latencies += self.scheduler.take_latencies()
        latencies = self._latencies
        result: dict[str, Any] = {k: sum(v) for k, v in counters.items()}
        result["wall_s"] = self._wall
        result["tokens_per_s"] = (result["sampled"] - self._lost) / self._wall if self._wall else 0.0
        result["handoff_latency_ms"] = float(np.median(latencies)) * 1e3 if latencies else None
        for m, name in enumerate(self.names):
            own = {k: v[m] for k, v in counters.items()}
            own["occupancy"] = self._rows_in[m] / own["forwards"] if own["forwards"] else 0.0
            own["blocks"] = self.num_blocks[m]
            result[name] = own
        return result
