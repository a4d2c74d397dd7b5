"""Co-RL: several models answer the same questions, exchange ballots, and each is rewarded by its peers' answers.

One step: every voter answers the step's questions and publishes a ballot for each; labels are made from the ballots;
then every student is updated on its own rollouts. All answers come before all updates, so neither the order of the
models nor how they share the device enters the result. No gold answer is inside: the column is cut from the data, and
monitors that know it see labels but are seen by nobody.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from fastcollab import grading
from fastcollab.advantages import group_advantages
from fastcollab.callbacks import Callbacks
from fastcollab.checkpoint import checkpoints, find_checkpoint, load_checkpoint, prune, save_checkpoint, save_model
from fastcollab.config import CoRLConfig, require
from fastcollab.data import Cursor, load_dataset
from fastcollab.diagnostics import Alarms, cohort_metrics, gold_metrics
from fastcollab.engine import Engine, load_models
from fastcollab.exchange import Exchange, LocalExchange
from fastcollab.labels import Label, OtherView, make_labels
from fastcollab.learner import Learner
from fastcollab.model import Model
from fastcollab.packing import Item
from fastcollab.pools import parse_memory
from fastcollab.progress import Progress
from fastcollab.sampling import content_uid
from fastcollab.types import TrainResult
from fastcollab.voters import EMA, Voter, make_grader

SCALAR = ("peer_likelihood", "self_certainty", "entropy")


class Cohort:
    """The parts of a run, made once; ``run`` is the loop."""

    def __init__(
        self,
        models: Mapping[str, Any],
        train_dataset: Any,
        args: CoRLConfig | None = None,
        peft_config: Any = None,
        tokenizers: Any = None,
        eval_dataset: Any = None,
        callbacks: Sequence[Any] = (),
        exchange: Exchange | None = None,
    ) -> None:
        self.args = args = CoRLConfig() if args is None else args
        self.names = sorted(models)
        require(all("@" not in name for name in models), "models", list(models), "names without '@'")
        self.gold, rows = _without_gold(load_dataset(train_dataset), args.gold_column)
        self.rows = rows
        self.eval_rows = load_dataset(eval_dataset, "eval_dataset") if eval_dataset is not None else None
        self.models = load_models(prepare(models, peft_config, args), args.device, args.model_init_kwargs)
        self.gold_keys = {uid: gold_key(answer, args.grader) for uid, answer in self.gold.items()}
        self.cursor = Cursor(len(rows), args.prompts_per_step, args.seed, args.shuffle)
        self.total_steps = args.max_steps if args.max_steps > 0 else self.cursor.num_steps(args.num_train_epochs)
        self.labels = self._labels()
        self.voters = self._voters(tokenizers)
        self.students = [name for name in self.voters if name.partition("@")[2] != "ema"]
        self.learners = {
            name: Learner(self.models[name], self.voters[name].engine.vocab_size, args, self.total_steps)
            for name in self.names
        }
        self.exchange = exchange or LocalExchange(self.run_id, {v.name: v.view for v in self.voters.values()})
        first = self.learners[self.names[0]]
        parts = (first.model.module, self.voters[self.names[0]].engine.tokenizer, first.optimizer, first.lr_schedule)
        self.callbacks = Callbacks(callbacks, args, *parts)
        self.alarms = Alarms(self.names)
        self.history: list[dict[str, Any]] = []
        self.step = 0

    # -- the loop

    def run(self, resume: bool | str | Path = False) -> TrainResult:
        args, out = self.args, Path(self.args.output_dir)
        out.mkdir(parents=True, exist_ok=True)
        found = [p.name for p in checkpoints(out)]
        if resume:
            self.resume(find_checkpoint(out, resume), out)
        elif found:
            raise ValueError(
                f"output_dir: got {str(out)!r} with {found[-1]} of an earlier run, need an empty folder or resume"
            )
        self.progress = Progress(self.total_steps, not args.disable_tqdm, args.output_dir, args.logging_steps)
        self.callbacks.begin(self.total_steps, self.step)
        mode = "a" if resume else "w"
        with open(out / "metrics.jsonl", mode) as self.sink, open(out / "labels.jsonl", mode) as self.label_sink:
            with self.progress:
                while self.step < self.total_steps and not self.callbacks.stop:
                    self.log(self.train_step(), is_step=True)
                    if args.eval_steps and self.step % args.eval_steps == 0:
                        self.evaluate()
                    if args.save_steps and self.step % args.save_steps == 0:
                        self.checkpoint(out)
                if self.eval_rows and not (args.eval_steps and self.step % args.eval_steps == 0):
                    self.evaluate()
        for name in self.names:
            save_model(self.models[name], self.voters[name].engine.tokenizer, out / name)
        self.callbacks.end()
        return TrainResult({n: m.peft or m.module for n, m in self.models.items()}, self.history, str(out))

    def train_step(self) -> dict[str, Any]:
        """Answer, exchange, label, update; the metrics row of the step."""
        started = perf_counter()
        rows = [self.rows[index] for index, _ in self.cursor.next_batch()]
        uids = [row["uid"] for row in rows]
        for voter in self.voters.values():
            voter.answer(rows, uids, self.step, self.num_votes, self.args)
        answered = perf_counter()
        ballots = self.publish(uids)
        labels = self.labels(self.step, uids, self.students, ballots)
        rewards = {name: self.rewards(name, uids, labels) for name in self.students}
        self.log_labels(uids, ballots, labels)
        row = cohort_metrics(uids, self.students, ballots, labels, rewards)
        if self.gold:
            row |= gold_metrics(uids, self.students, ballots, labels, rewards, self.gold_keys)
        voted = perf_counter()
        for name in self.names:
            row |= {f"{name}/{key}": value for key, value in self.update(name, rewards).items()}
        self.step += 1
        row["reward"] = float(np.nanmean([row.get(f"{name}/reward", np.nan) for name in self.names]))
        row |= {"time/answer": answered - started, "time/vote": voted - answered}
        return row | {"step_time": perf_counter() - started}

    def publish(self, uids: Sequence[str]) -> dict[tuple[str, str], Any]:
        """Every voter's ballots through the exchange, by (voter, uid)."""
        for voter in self.voters.values():
            for group, uid in enumerate(uids):
                self.exchange.publish(self.step, uid, voter.ballot(self.run_id, self.step, uid, group, self.num_votes))
        collected = {uid: self.exchange.collect(self.step, uid) for uid in uids}
        return {(name, uid): ballot for uid, found in collected.items() for name, ballot in found.items()}

    def rewards(self, student: str, uids: Sequence[str], labels: Mapping[tuple[str, str], Label]) -> np.ndarray:
        """Rewards [prompts, G] of the trained rollouts, NaN where the prompt has no label."""
        G, keys = self.args.num_generations, self.voters[student].keys
        rewards = np.full((len(uids), G), np.nan)
        for group, uid in enumerate(uids):
            for k in range(G):
                reward = labels[student, uid].reward(keys[group * self.num_votes + k])
                rewards[group, k] = np.nan if reward is None else reward
        return rewards

    def update(self, name: str, rewards: Mapping[str, np.ndarray]) -> dict[str, float]:
        """One optimiser step of a model on the rollouts of all its views."""
        args, learner, items = self.args, self.learners[name], []
        for student in (s for s in self.students if s.partition("@")[0] == name):
            voter, own = self.voters[student], rewards[student]
            trained = [r for r in voter.rollouts if r.sample < args.num_generations]
            groups = [r.group for r in trained]
            advantage, metrics = group_advantages(torch.from_numpy(own.ravel()), groups, args.scale_rewards, eps=1e-4)
            kept = ~np.isnan(own.ravel())
            if args.mask_truncated_completions:
                kept &= [r.finish != "length" for r in trained]
            masks = [np.full(len(r.ids), k) for r, k in zip(trained, kept, strict=True)]
            items += learner.items(trained, masks, advantage.tolist(), kept)
        row = metrics | self.describe(self.voters[name])
        if self.alarms.paused(name):
            return row | {"paused": 1.0}
        return row | learner.update(items, self.denominator(items), self.step) | {"paused": 0.0}

    def denominator(self, items: Sequence[Item]) -> float:
        """What the loss type divides by; with "active" the groups without signal are not counted (corl spec 2.9)."""
        args = self.args
        counted = [i for i in items if i.kept and (args.denominator == "all" or i.advantage != 0)]
        if args.loss_type in ("dapo", "cispo"):
            return max(1, sum(int(i.mask.sum()) for i in counted))
        return max(1, len(counted))

    def evaluate(self) -> dict[str, Any]:
        """One row under ``eval/``: each model's accuracy on the evaluation questions against their gold answers."""
        row: dict[str, Any] = {"step": self.step}
        gold = [gold_key(answer[self.args.gold_column], self.args.grader) for answer in self.eval_rows]
        for name in self.names:
            voter = self.voters[name]
            asked = Voter(f"{name}@eval", voter.model, voter.engine, voter.view)
            asked.answer(self.eval_rows, [str(i) for i in range(len(gold))], 0, 1, self.args)
            right = [
                key is not None and key == gold[r.group] for key, r in zip(asked.keys, asked.rollouts, strict=True)
            ]
            row[f"eval/{name}/accuracy"] = float(np.mean(right))
        self.log(row, is_step=False)
        return row

    # -- parts

    @property
    def num_votes(self) -> int:
        return self.args.num_votes or self.args.num_generations

    @property
    def run_id(self) -> str:
        """What ties a ballot to this run: the questions, the seed and the voters."""
        return f"{content_uid(json.dumps([r['uid'] for r in self.rows])):x}-{self.args.seed}"

    def _labels(self) -> Any:
        args, options = self.args, dict(self.args.label_options or {})
        named = args.labels or ("pair" if len(self.names) == 2 else "ring")
        if not isinstance(named, str):
            return named
        if named == "gold":
            require(bool(self.gold), f"column {args.gold_column!r}", None, "the right answers, for labels 'gold'")
            options["answers"] = self.gold_keys
        return make_labels(named, args.vote, args.seed, **options)

    def _voters(self, tokenizers: Any) -> dict[str, Voter]:
        """Voter by name: the models, and the second voices that the labels ask for."""
        args, views = self.args, dict(self.args.views or {})
        columns = set(self.rows[0])
        students = list(self.names)
        if isinstance(self.labels, OtherView):
            require(set(views) == set(self.names), "views", sorted(views), f"a column for each of {self.names}")
            students += [f"{name}@{views[name]}" for name in self.names]
            views = {}
        wanted = self.labels.voters(students)
        self.teachers = {
            name: EMA(self.models[name.partition("@")[0]], *args.ema, self.total_steps)
            for name in wanted
            if name.endswith("@ema")
        }
        memory = parse_memory(args.kv_memory) // len(wanted)
        voters, engines = {}, {}
        for name in wanted:
            model_name, _, voice = name.partition("@")
            model = self.teachers[name].model if voice == "ema" else self.models[model_name]
            view = voice if voice and voice != "ema" else views.get(model_name, "prompt")
            require(view in columns, f"view of {name!r}", view, f"a column of the data: {sorted(columns)}")
            if id(model) not in engines:
                tokenizer = tokenizers.get(model_name) if isinstance(tokenizers, Mapping) else tokenizers
                settings = (args.device, memory, args.block_size, args.token_budget)
                engines[id(model)] = Engine({model_name: model}, tokenizer, *settings)
            voters[name] = Voter(name, model, engines[id(model)], view)
        return voters

    def describe(self, voter: Voter) -> dict[str, float]:
        lengths, stats = [len(r.ids) for r in voter.rollouts], voter.engine.stats()
        return {
            "num_tokens": sum(lengths),
            "tokens_per_s/rollout": stats["tokens_per_s"],
            "completions/mean_length": float(np.mean(lengths)),
            "completions/clipped_ratio": float(np.mean([r.finish == "length" for r in voter.rollouts])),
        }

    def log(self, row: dict[str, Any], is_step: bool) -> None:
        row = {"step": self.step} | row
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self.history.append(clean)
        self.sink.write(json.dumps(clean, allow_nan=False) + "\n")
        self.sink.flush()
        self.callbacks.log(clean, self.step, is_step)
        if is_step:
            self.progress.step(clean)
            for name, reason in self.alarms.look(clean).items() if self.args.alarms else ():
                warnings.warn(f"step {self.step}: {name} is not updated any more: {reason}", stacklevel=2)

    def log_labels(self, uids: Sequence[str], ballots: Mapping, labels: Mapping[tuple[str, str], Label]) -> None:
        """One line per question: every ballot and every label; all metrics can be recomputed from these."""
        for uid in uids:
            said = {name: ballots[name, uid] for name in self.voters}
            line = {"run": self.run_id, "step": self.step, "uid": uid}
            line["ballots"] = {
                name: {"view": b.view, "version": b.version, "keys": list(b.keys)} for name, b in said.items()
            }
            line["labels"] = {
                name: {
                    "key": labels[name, uid].key,
                    "scores": labels[name, uid].scores,
                    "teachers": labels[name, uid].teachers,
                }
                for name in self.students
            }
            self.label_sink.write(json.dumps(line, allow_nan=False) + "\n")
        self.label_sink.flush()

    def checkpoint(self, out: Path) -> None:
        """All models, optimisers, teachers, the cursor and the alarms, complete or absent; caches start cold after it."""
        for voter in self.voters.values():
            voter.engine.forget()
        tokenizers = {name: self.voters[name].engine.tokenizer for name in self.names}
        state = {"cursor": self.cursor.state_dict(), "alarms": self.alarms.state_dict(), "run": self.run_id}
        teachers = {name: ema.model for name, ema in self.teachers.items()}
        save_checkpoint(out, self.step, self.learners, tokenizers, state, self.args.to_dict(), teachers)
        prune(out, self.args.save_total_limit)

    def resume(self, folder: Path, out: Path) -> None:
        """Continue from a checkpoint; rows of both logs beyond it are dropped."""
        state = load_checkpoint(folder, self.learners, {name: ema.model for name, ema in self.teachers.items()})
        require(state["run"] == self.run_id, "checkpoint of run", state["run"], f"{self.run_id}: these data and seed")
        self.cursor.load_state_dict(state["cursor"])
        self.alarms.load_state_dict(state["alarms"])
        self.step = state["step"]
        self.history = _keep(out / "metrics.jsonl", lambda row: row["step"] <= self.step)
        _keep(out / "labels.jsonl", lambda row: row["step"] < self.step)


def gold_key(answer: Any, grader: Any) -> str | None:
    """The key of a right answer as the data hold it: bare, or boxed."""
    if callable(grader):
        return make_grader(grader)(str(answer))
    key = grading.key(grading.extract(str(answer)) or str(answer), grader)
    return None if key is None else repr(key)


def _without_gold(rows: list[dict], column: str) -> tuple[dict[str, Any], list[dict]]:
    """(uid -> right answer where the data have one, rows without it); rows without a uid are named by their place."""
    kept, gold = [], {}
    for i, row in enumerate(rows):
        uid = str(row.get("uid", i))
        if row.get(column) is not None:
            gold[uid] = row[column]
        kept.append({key: value for key, value in row.items() if key != column} | {"uid": uid})
    require(len({row["uid"] for row in kept}) == len(kept), "uid", "one that occurs twice", "one per question")
    return gold, kept


def _keep(path: Path, wanted: Any) -> list[dict]:
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [row for row in rows if wanted(row)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def prepare(models: Mapping[str, Any], peft_config: Any, args: CoRLConfig) -> dict[str, Any]:
    """The trained models: paths are loaded in float32 unless told otherwise, a ``peft_config`` gives each an adapter."""
    require(len(models) > 0, "models", dict(models), "at least one model")
    ready = {}
    for name, source in models.items():
        if isinstance(source, (str, Path)) or peft_config is not None:
            dtype = {} if peft_config is not None else {"dtype": torch.float32}
            source = Model(name, source, device=args.device, init_kwargs=dtype | (args.model_init_kwargs or {}))
        if peft_config is not None:
            from peft import get_peft_model

            source = Model(name, get_peft_model(source.module, peft_config), tokenizer=source.tokenizer)
        ready[name] = source
    return ready
