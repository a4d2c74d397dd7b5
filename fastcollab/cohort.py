"""Co-RL: several models answer the same questions, exchange ballots, and each is rewarded by its peers' answers.

One step: every voter answers the step's questions and publishes a ballot for each; labels are made from the ballots;
then every student is updated on its own rollouts. All answers come before all updates, so neither the order of the
models nor how they share the device enters the result. Source: corl spec 2.5.
"""

from __future__ import annotations

import json
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from fastcollab import grading, parity
from fastcollab.advantages import bnpo_weights, group_advantages
from fastcollab.callbacks import Callbacks
from fastcollab.checkpoint import load_checkpoint, prune, save_checkpoint, save_model
from fastcollab.confidence import KINDS, Confidence
from fastcollab.config import CoRLConfig, require
from fastcollab.data import Cursor, load_dataset
from fastcollab.diagnostics import Alarms, accuracy, cohort_metrics, gold_metrics, selection_score
from fastcollab.engine import Engine, load_models
from fastcollab.exchange import Exchange, LocalExchange
from fastcollab.labels import Ballots, Label, Labels, OtherView, make_labels
from fastcollab.learner import Learner, trainable
from fastcollab.model import Model
from fastcollab.pools import parse_memory
from fastcollab.questions import readable, without_gaps, without_gold
from fastcollab.run_log import RunLog, finite, keep_lines
from fastcollab.sampling import content_uid
from fastcollab.tokens import encode_prompt
from fastcollab.types import Rollout, TrainResult
from fastcollab.voters import EMA, Voter, gold_key

LONG = 64  # tokens; shorter answers are often written twice, and that is no sign of collapse


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
        require(isinstance(args, CoRLConfig), "args", type(args).__name__, "CoRLConfig for method 'corl'")
        named = len(models) > 0 and not any("@" in name or "," in name for name in models)
        require(named, "models", list(models), "at least one, names without '@' and ','")
        self.names = sorted(models)
        self.rows, self.gold = self._questions(train_dataset, "train_dataset")
        self.eval_rows, self.eval_gold = self._questions(eval_dataset, "eval_dataset") if eval_dataset else ([], {})
        self.labels = self._labels()
        self.views, self.students = self._views()
        self.rows, self.eval_rows = (
            without_gaps(rows, set(self.views.values()), args.drop_missing) if rows else []
            for rows in (self.rows, self.eval_rows)
        )
        adapters = peft_config if isinstance(peft_config, Mapping) else dict.fromkeys(self.names, peft_config)
        ready = {name: trainable(name, models[name], adapters.get(name), args) for name in self.names}
        self.models = load_models(ready, args.device, args.model_init_kwargs)
        _own_weights(self.models)
        self.teachers = {n: EMA(self.models[_model(n)], *args.ema) for n in self.views if n.endswith("@ema")}
        self.voters = self._voters(tokenizers)
        self.rows, self.eval_rows = (
            readable(rows, [self._lengths(i, row) for i, row in enumerate(rows)]) if rows else []
            for rows in (self.rows, self.eval_rows)
        )
        self.cursor = Cursor(len(self.rows), args.prompts_per_step, args.seed, args.shuffle, once=True)
        self.total_steps = args.max_steps if args.max_steps > 0 else self.cursor.num_steps(args.num_train_epochs)
        self.learners = {
            name: Learner(self.models[name], self.voters[name].engine.vocab_size, args, self.total_steps)
            for name in self.names
        }
        read = [[row["uid"], *(row[view] for view in sorted(set(self.views.values())))] for row in self.rows]
        self.run_id = f"{content_uid(json.dumps(read)):x}-{args.seed}"
        self.exchange = exchange or LocalExchange(self.run_id, self.views)
        self.alarms = Alarms(self.names)
        first = self.learners[self.names[0]]
        parts = (first.model.module, self.voters[self.names[0]].engine.tokenizer, first.optimizer, first.lr_schedule)
        self.callbacks = Callbacks(callbacks, args, *parts)
        self.step = 0

    # -- the loop

    def run(self, resume: bool | str | Path = False) -> TrainResult:
        args = self.args
        self.run_log = log = RunLog(args, self.callbacks, self.total_steps, resume)
        if log.checkpoint:
            self.resume(log.checkpoint)
        with log, open(log.folder / "labels.jsonl", "a" if log.checkpoint else "w") as self.label_sink:
            while self.step < self.total_steps and not self.callbacks.stop:
                row = log.write(self.train_step())
                for name, reason in self.alarms.look(row).items() if args.alarms else ():
                    warnings.warn(f"step {self.step}: {name} is not updated any more: {reason}", stacklevel=2)
                if self.eval_rows and args.eval_steps and self.step % args.eval_steps == 0:
                    self.evaluate()
                if args.save_steps and self.step % args.save_steps == 0:
                    self.checkpoint()
            if self.eval_rows and not (args.eval_steps and self.step % args.eval_steps == 0):
                self.evaluate()
            for name in self.names:
                save_model(self.models[name], self.voters[name].engine.tokenizer, log.folder / name)
        models = {name: model.peft or model.module for name, model in self.models.items()}
        return TrainResult(models, log.history, str(log.folder))

    def train_step(self) -> dict[str, Any]:
        """Answer, exchange, label, update; the metrics row of the step."""
        started = perf_counter()
        self.step_rows = rows = [self.rows[index] for index, _ in self.cursor.next_batch()]
        uids = [row["uid"] for row in rows]
        for voter in self.voters.values():
            voter.answer(rows, self.step, self.num_votes, self.args)
        answered = perf_counter()
        ballots = self.publish(uids)
        labels = self.labels(self.step, uids, self.students, ballots)
        rewards = {name: self.rewards(name, rows, labels) for name in self.students}
        row = cohort_metrics(uids, self.students, ballots, labels, rewards)
        if self.gold:
            row |= gold_metrics(uids, self.students, ballots, labels, rewards, self.gold, self.same)
        self.log_labels(uids, ballots, labels, rewards)
        voted = perf_counter()
        for name in self.names:
            row |= {f"{name}/{key}": value for key, value in self.update(name, rewards).items()}
        self.step += 1
        for name, teacher in self.teachers.items():
            teacher.follow(self.step / self.total_steps)
            self.voters[name].version += 1
        row["reward"] = _mean([row.get(f"{name}/reward") for name in self.names])
        row["corl/label_agreement"] = _mean([value for key, value in row.items() if key.startswith("agree/")])
        row["corl/tie_frac"] = _mean([row[f"{name}/tie_rate"] for name in self.students])
        now = perf_counter()
        times = {"time/answer": answered - started - self.grading_s, "time/vote": voted - answered + self.grading_s}
        return {"step": self.step} | row | times | {"time/train": now - voted, "step_time": now - started}

    def publish(self, uids: Sequence[str]) -> Ballots:
        """Every voter's ballots through the exchange, by (voter, uid)."""
        for voter in self.voters.values():
            for group, uid in enumerate(uids):
                self.exchange.publish(self.step, uid, voter.ballot(self.run_id, self.step, uid, group, self.num_votes))
        collected = {uid: self.exchange.collect(self.step, uid) for uid in uids}
        return {(name, uid): ballot for uid, found in collected.items() for name, ballot in found.items()}

    def rewards(
        self, student: str, rows: Sequence[Mapping[str, Any]], labels: Mapping[tuple[str, str], Label]
    ) -> np.ndarray:
        """Rewards fp64 [prompts, G] of the trained rollouts, NaN where the prompt has no label."""
        args, V, G = self.args, self.num_votes, self.args.num_generations
        if isinstance(self.labels, Confidence):
            return self.labels.rewards(student, self.voters, rows, args).reshape(len(rows), V)[:, :G]
        rewards = np.full((len(rows), G), np.nan)
        for group, row in enumerate(rows):
            label, keys = labels[student, row["uid"]], self.voters[student].keys[group * V :]
            for k in range(G):
                reward = parity.reward(keys[k], label.scores) if args.parity and label.scores else label.reward(keys[k])
                rewards[group, k] = (0.0 if args.unlabelled == "zero" else np.nan) if reward is None else reward
        return rewards

    def update(self, name: str, rewards: Mapping[str, np.ndarray]) -> dict[str, float]:
        """One optimiser step of a model on the rollouts of all its views."""
        args, learner, row = self.args, self.learners[name], {}
        rollouts: list[Rollout] = []
        advantages, kept, counted = [], [], []
        for student in (s for s in self.students if _model(s) == name):
            own = torch.from_numpy(rewards[student].ravel())
            trained = [r for r in self.voters[student].rollouts if r.sample < args.num_generations]
            groups = [r.group for r in trained]
            advantage, metrics = group_advantages(own, groups, args.scale_rewards, eps=1e-4)
            keep = ~own.isnan().numpy()
            if args.mask_truncated_completions:
                keep &= [r.finish != "length" for r in trained]
            signal = {group for group, a in zip(groups, advantage.tolist(), strict=True) if a != 0}
            rollouts += trained
            advantages += advantage.tolist()
            kept += keep.tolist()
            active = [args.denominator == "all" or group in signal for group in groups]
            counted += (keep & active).tolist()
            row |= {key: value for key, value in metrics.items() if student == name}
            self.log_completions(student, trained, rewards[student].ravel())
        row |= self.describe(self.voters[name])
        if self.alarms.paused(name):
            return row | {"paused": 1.0}
        tokens = [len(r.ids) * k for r, k in zip(rollouts, counted, strict=True)]
        if args.loss_type == "bnpo":
            places = [i for i, n in enumerate(tokens) if n]
            for i, weight in zip(places, bnpo_weights([tokens[i] for i in places], args.bnpo_rows), strict=True):
                advantages[i] *= float(weight)
        masks = [np.full(len(r.ids), k) for r, k in zip(rollouts, kept, strict=True)]
        items = learner.items(rollouts, masks, advantages, np.array(kept))
        denominator = sum(tokens) if args.loss_type in ("dapo", "cispo", "bnpo") else sum(counted)
        for voter in self.voters.values():
            voter.version += voter.model is self.models[name]
        return row | learner.update(items, max(1, denominator), self.step) | {"paused": 0.0}

    def log_completions(self, student: str, rollouts: Sequence[Rollout], rewards: np.ndarray) -> None:
        """With the setting of that name, every ``logging_steps`` steps."""
        args, voter = self.args, self.voters[student]
        if args.log_completions and (self.step + 1) % args.logging_steps == 0:
            uids = [self.step_rows[r.group]["uid"] for r in rollouts]
            facts = [{"step": self.step + 1, "model": student, "uid": uid, "reward": finite(reward)}
                     for uid, reward in zip(uids, rewards.tolist(), strict=True)]  # fmt: skip
            self.run_log.completions(rollouts, voter.engine.tokenizer, args.num_completions_to_print, facts)

    def evaluate(self) -> dict[str, Any]:
        """One row under ``eval/``, of V answers to each evaluation question.

        Per model the accuracy of its answers and of its majority where the right ones are known, and
        ``selection_score``, which needs none: take the checkpoint where it is highest. It compares models with each
        other and with their own second views, so one model alone has none.
        """
        row, ballots, V = {"step": self.step}, {}, self.num_votes
        uids = [question["uid"] for question in self.eval_rows]
        for name in self.students:
            own = self.voters[name]
            asked = Voter(name, own.model, own.engine, own.view, salt="eval")
            asked.answer(self.eval_rows, 0, V, self.args)
            ballots |= {(name, uid): asked.ballot(self.run_id, 0, uid, group, V) for group, uid in enumerate(uids)}
        if self.eval_gold:
            for name in self.names:
                found = accuracy(uids, name, ballots, self.eval_gold, self.same)
                row |= {f"eval/{name}/{key}": value for key, value in found.items()}
        if len(self.students) > 1:
            row["eval/selection_score"] = selection_score(ballots)
        return self.run_log.write(row, is_step=False)

    # -- parts

    @property
    def num_votes(self) -> int:
        return self.args.num_votes or self.args.num_generations

    @property
    def same(self) -> Callable[[str | None, str | None], bool]:
        """How keys are compared with right answers."""
        return grading.equal if self.args.parity else operator.eq

    @property
    def teaching(self) -> str:
        """Who teaches whom by what votes: a checkpoint is resumed under the same."""
        return f"{type(self.labels).__name__} {self.views} of {self.num_votes} votes {sorted(self.args.vote.items())}"

    @property
    def grading_s(self) -> float:
        """Seconds that reading this step's answers took."""
        return sum(voter.grading_s for voter in self.voters.values())

    def _questions(self, dataset: Any, name: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Rows without their right answers, and the answers' keys by uid."""
        gold, rows = without_gold(load_dataset(dataset, name), self.args.gold_column)
        keys = {uid: gold_key(answer, self.args.grader) for uid, answer in gold.items()}
        return rows, {uid: key for uid, key in keys.items() if key is not None}

    def _labels(self) -> Labels:
        args, options = self.args, dict(self.args.label_options or {})
        named = args.labels or ("pair" if len(self.names) == 2 else "ring")
        takes_none = not isinstance(named, str) or named in KINDS
        require(not (options and takes_none), "label_options", options, f"none with labels {named!r}")
        if not isinstance(named, str):
            return named
        if named in KINDS:
            return Confidence(named)
        if named == "gold":
            need = "the right answers, for labels 'gold'"
            require(bool(self.gold), f"column {args.gold_column!r}", None, need)
            unknown = [row["uid"] for row in self.rows if row["uid"] not in self.gold]
            require(not unknown, f"column {args.gold_column!r}", f"none for {unknown[:4]}", need)
            options["answers"] = self.gold
        return make_labels(named, args.vote, args.seed, **options)

    def _views(self) -> tuple[dict[str, str], list[str]]:
        """(the view of each voter, the students): the models, and the second voices that the labels ask for."""
        given = dict(self.args.views or {})
        unknown = sorted(set(given) - set(self.names))
        require(not unknown, "views", unknown, f"names among {self.names}")
        students, seconds = list(self.names), {}
        if isinstance(self.labels, OtherView):
            need = f"a second wording of the questions for each of {self.names}"
            require(set(given) == set(self.names), "views", self.args.views, need)
            need = "second wordings: columns other than 'prompt'"
            require("prompt" not in given.values(), "views", self.args.views, need)
            seconds, given = {f"{name}@{view}": view for name, view in given.items()}, {}
            students += seconds
        wanted = self.labels.voters(students)
        return {name: seconds.get(name) or given.get(_model(name), "prompt") for name in wanted}, students

    def _voters(self, tokenizers: Any) -> dict[str, Voter]:
        """A voter for each view, voters of one model on one engine."""
        args = self.args
        models = {name: self.teachers[name].model if name in self.teachers else self.models[_model(name)]
                  for name in self.views}  # fmt: skip
        memory = parse_memory(args.kv_memory) // len({id(model) for model in models.values()})
        voters, engines = {}, {}
        for name, model in models.items():
            if id(model) not in engines:
                tokenizer = tokenizers.get(_model(name)) if isinstance(tokenizers, Mapping) else tokenizers
                settings = (args.device, memory, args.block_size, args.token_budget)
                engines[id(model)] = Engine({_model(name): model}, tokenizer, *settings)
            voters[name] = Voter(name, model, engines[id(model)], self.views[name])
        return voters

    def _lengths(self, index: int, row: Mapping[str, Any]) -> list[tuple[int, int | None]]:
        """(tokens of a question, the limit) for each voter."""
        kwargs = self.args.chat_template_kwargs
        return [
            (len(encode_prompt(v.engine.tokenizer, row[v.view], index, kwargs)), v.model.max_length)
            for v in self.voters.values()
        ]

    def describe(self, voter: Voter) -> dict[str, float]:
        """Lengths and speed of a voter's rollouts, and the part that repeats another of its group."""
        lengths = [len(r.ids) for r in voter.rollouts]
        repeated = 1 - len({(r.group, tuple(r.ids)) for r in voter.rollouts}) / len(lengths)
        alarming = {"dup": repeated} if np.mean(lengths) >= LONG else {}
        return alarming | {
            "num_tokens": sum(lengths),
            "tokens_per_s/rollout": voter.engine.stats()["tokens_per_s"],
            "completions/mean_length": float(np.mean(lengths)),
            "completions/p10_length": float(np.percentile(lengths, 10)),
            "completions/p90_length": float(np.percentile(lengths, 90)),
            "completions/clipped_ratio": float(np.mean([r.finish == "length" for r in voter.rollouts])),
            "completions/duplicates": repeated,
        }

    def log_labels(
        self,
        uids: Sequence[str],
        ballots: Ballots,
        labels: Mapping[tuple[str, str], Label],
        rewards: Mapping[str, np.ndarray],
    ) -> None:
        """One line per question: ballots, labels and what they paid; what the optimiser did is in metrics.jsonl."""
        for group, uid in enumerate(uids):
            line: dict[str, Any] = {"run": self.run_id, "step": self.step, "uid": uid, "ballots": {}, "labels": {}}
            for name, voter in self.voters.items():
                ballot = ballots[name, uid]
                own = voter.rollouts[group * self.num_votes : (group + 1) * self.num_votes]
                line["ballots"][name] = {"view": ballot.view, "version": ballot.version, "keys": ballot.keys,
                                         "lengths": [len(r.ids) for r in own],
                                         "finish": [r.finish for r in own]}  # fmt: skip
            for name in self.students:
                label, paid = labels[name, uid], rewards[name][group].tolist()
                line["labels"][name] = {"key": label.key, "scores": label.scores, "teachers": label.teachers,
                                        "rewards": [finite(r) for r in paid]}  # fmt: skip
            self.label_sink.write(json.dumps(line, allow_nan=False) + "\n")
        self.label_sink.flush()

    def checkpoint(self) -> None:
        """All models, optimisers, teachers, the cursor, the alarms, complete or absent; caches start cold after it."""
        for voter in self.voters.values():
            voter.engine.forget()
        tokenizers = {name: self.voters[name].engine.tokenizer for name in self.names}
        state = {"cursor": self.cursor.state_dict(), "alarms": self.alarms.state_dict(), "run": self.run_id}
        state["teaching"] = self.teaching
        state["versions"] = {name: voter.version for name, voter in self.voters.items()}
        teachers = {name: ema.model for name, ema in self.teachers.items()}
        root = self.run_log.folder
        save_checkpoint(root, self.step, self.learners, tokenizers, state, self.args.to_dict(), teachers)
        prune(root, self.args.save_total_limit)

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint; rows of both logs beyond it are dropped."""
        state = load_checkpoint(folder, self.learners, {name: ema.model for name, ema in self.teachers.items()})
        require(state["run"] == self.run_id, "checkpoint of run", state["run"], f"{self.run_id}: these data and seed")
        need = f"{self.teaching}, as this run has"
        require(state["teaching"] == self.teaching, "checkpoint's labels", state["teaching"], need)
        self.cursor.load_state_dict(state["cursor"])
        self.alarms.load_state_dict(state["alarms"])
        for name, version in state["versions"].items():
            self.voters[name].version = version
        self.step = state["step"]
        self.run_log.rewind(self.step)
        keep_lines(self.run_log.folder / "labels.jsonl", lambda row: row["step"] < self.step)


def _model(voter: str) -> str:
    """The model's name in a voter's: what stands before "@"."""
    return voter.partition("@")[0]


def _own_weights(models: Mapping[str, Model]) -> None:
    """Raises ValueError where two models train the same weights: they would be one."""
    owner: dict[int, str] = {}
    for name, model in models.items():
        for parameter in model.module.parameters():
            first = owner.setdefault(id(parameter), name)
            need = "weights of their own: give the path twice, or a deepcopy"
            require(first == name, "models", f"the same weights as {first!r} and {name!r}", need)


def _mean(values: Sequence[float | None]) -> float:
    known = [v for v in values if v is not None and v == v]
    return float(np.mean(known)) if known else float("nan")
