"""Training: one loop, prompts -> rollouts -> rewards -> advantages -> update, whatever the method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from fastcollab.callbacks import Callbacks
from fastcollab.checkpoint import load_checkpoint, prune, save_checkpoint, save_model
from fastcollab.cohort import Cohort
from fastcollab.config import TrainConfig, parse_memory, require
from fastcollab.data import Cursor, load_dataset
from fastcollab.engine import Engine, load_models
from fastcollab.evaluation import evaluate, legibility
from fastcollab.learner import Learner, trainable
from fastcollab.methods import METHODS
from fastcollab.model import Model
from fastcollab.packing import Item
from fastcollab.rewards import RewardFunctions
from fastcollab.run_log import RunLog, finite
from fastcollab.schedules import Solo
from fastcollab.types import Rollout, TrainResult


def train(
    method: str,
    models: dict[str, Any],
    train_dataset: Any,
    reward_funcs: Callable | Sequence[Callable] | None = None,
    args: TrainConfig | None = None,
    *,
    peft_config: Any = None,
    processing_class: Any = None,
    eval_dataset: Any = None,
    callbacks: Sequence[Any] = (),
    resume_from_checkpoint: bool | str | Path = False,
) -> TrainResult:
    """Train by ``method``, the models by role: "grpo" {"policy"}, "tandem" {"senior", "junior"}, "mintrl" {"policy",
    "verifier"}, "corl" any names.

    A model is a path or a ``PreTrainedModel``; with ``peft_config`` the trained one becomes a LoRA model and the junior
    may be ``"base"``, the same weights with the adapter off. A verifier is a model too, ``"base"`` (the policy's
    starting weights), ``"policy"`` (its current ones) or an object with ``review`` and ``correct``, such as
    :class:`fastcollab.verifiers.FunctionVerifier`. Datasets: list of dicts, JSONL path or
    ``datasets.Dataset`` with column ``prompt``. Writes ``metrics.jsonl`` (a row per optimiser step) and the trained
    model as a Hugging Face folder to ``args.output_dir``; with ``args.save_steps`` checkpoints too, and
    ``resume_from_checkpoint`` (True: the newest) continues one, on CPU bit for bit. "corl" takes no ``reward_funcs``:
    its rewards are the peers' answers; ``processing_class`` and ``peft_config`` may then be dicts by model.
    """
    if method == "corl":
        require(reward_funcs is None, "reward_funcs", reward_funcs, "none for method 'corl': peers' answers reward")
        parts = (peft_config, processing_class, eval_dataset, callbacks)
        return Cohort(models, train_dataset, args, *parts).run(resume_from_checkpoint)
    require(method in METHODS, "method", method, " or ".join([*METHODS, "corl"]))
    require(reward_funcs is not None, "reward_funcs", None, f"a function or a list of them for method {method!r}")
    parts = (peft_config, processing_class, eval_dataset, callbacks)
    return Trainer(method, models, train_dataset, reward_funcs, args, *parts).run(resume_from_checkpoint)


class Trainer:
    """The parts of a run, made once; ``run`` is the loop."""

    def __init__(
        self, method, models, train_dataset, reward_funcs, args, peft_config, processing_class, eval_dataset, callbacks
    ) -> None:
        self.args = args = METHODS[method].config() if args is None else args
        config = METHODS[method].config
        require(isinstance(args, config), "args", type(args).__name__, f"{config.__name__} for method {method!r}")
        self.method = METHODS[method](list(models), args)
        self.rows = load_dataset(train_dataset)
        self.eval_rows = load_dataset(eval_dataset, "eval_dataset") if eval_dataset is not None else None
        self.score_funcs = RewardFunctions(reward_funcs, args.reward_weights)
        self.score_funcs.check(self.rows[0])
        name = self.method.policy
        prepared = {role: models[role] for role in self.method.roles}
        prepared[name] = trainable(name, models[name], peft_config, args)
        self.models = load_models(prepared, args.device, args.model_init_kwargs)
        self.policy: Model = self.models[name]
        memory = parse_memory(args.kv_memory) // self.method.engines(models)
        self.engine = Engine(self.models, processing_class, args.device, memory, args.block_size, args.token_budget)
        self._freeze()
        self.method.begin(models, self.policy, self.engine, tuple(self.rows[0]))
        self.cursor = Cursor(len(self.rows), args.prompts_per_step * args.steps_per_generation, args.seed, args.shuffle)
        self.total_steps = self._total_steps()
        self.learner = Learner(self.policy, self.engine.vocab_size, args, self.total_steps)
        self.callbacks = Callbacks(
            callbacks, args, self.policy.module, self.engine.tokenizer, self.learner.optimizer, self.learner.lr_schedule
        )
        self.step = 0

    # -- the loop

    def run(self, resume: bool | str | Path = False) -> TrainResult:
        args = self.args
        self.run_log = log = RunLog(args, self.callbacks, self.total_steps, resume)
        if log.checkpoint:
            self.resume(log.checkpoint)
        with log:
            while self.step < self.total_steps and not self.callbacks.stop:
                started, first, cursor = perf_counter(), self.step, self.cursor.state_dict()
                try:
                    rollouts = self.rollouts()
                    rewards, row = self.rewards(rollouts)
                except FloatingPointError:
                    raise  # the weights are no longer worth keeping, and would push good ones out of the limit
                except Exception:  # a reward, a verifier: what was learnt so far is kept, the batch comes again
                    self.cursor.load_state_dict(cursor)
                    if args.save_steps and self.step:
                        self.checkpoint()
                    raise
                advantage, more = self.method.advantages(rewards, rollouts)
                row |= {"reward": None} | more | self.describe(rollouts) | self.method.metrics(rollouts, rewards)
                items, more = self.method.anchored(self.items(rollouts, rewards, advantage))
                row |= more
                row["completions/masked_ratio"] = sum(not i.kept for i in items) / len(items)
                for part in (parts := self.parts(items)):
                    before = perf_counter()
                    update = self.update(part)
                    update["tokens_per_s/train"] = self.rate([i.rollout for i in part], before)
                    self.step += 1
                    self.log(row | update | {"step_time": perf_counter() - started}, rollouts, rewards)
                    started = perf_counter()
                    if args.eval_steps and self.step % args.eval_steps == 0:
                        self.evaluate()
                    if self.step == self.total_steps or self.callbacks.stop:
                        break
                whole = next(parts, None) is None  # a checkpoint holds no half-used batch
                if whole and args.save_steps and self.step // args.save_steps > first // args.save_steps:
                    self.checkpoint()
            if self.eval_rows and not (args.eval_steps and self.step % args.eval_steps == 0):
                self.evaluate()
            save_model(self.policy, self.engine.tokenizer, log.folder / self.method.policy)
        models = {name: m.peft or m.module for name, m in self.models.items()}
        return TrainResult(models, log.history, str(log.folder))

    def rollouts(self) -> list[Rollout]:
        """One batch of prompts, ``num_generations`` rollouts each."""
        batch = self.cursor.next_batch()
        self.batch_rows = [self.rows[index] for index, _ in batch]
        self.engine.reset_stats()
        return self.engine.generate(
            [row["prompt"] for row in self.batch_rows],
            n=self.args.num_generations,
            schedule=self.method.schedule_at(self.step),
            sampling=self.args.sampling,
            seed=self.args.seed,
            step=self.step,
            uids=[row["uid"] for row in self.batch_rows] if "uid" in self.batch_rows[0] else None,
            chat_template_kwargs=self.args.chat_template_kwargs,
            skip_special_tokens=self.args.skip_special_tokens,
            rows=self.batch_rows,
        )

    def rewards(self, rollouts: Sequence[Rollout], rows: Sequence[dict] | None = None) -> tuple[np.ndarray, dict]:
        """Rewards [N] (NaN: every function abstained) and their metrics; ``rows[r.group]`` belongs to rollout r."""
        is_batch, rows = rows is None, self.batch_rows if rows is None else rows
        rows = [rows[r.group] for r in rollouts]
        scores = self.score_funcs(
            [row["prompt"] for row in rows],
            [_completion(row["prompt"], r) for row, r in zip(rows, rollouts, strict=True)],
            {name: [row.get(name) for row in rows] for name in rows[0]},
            completion_ids=[r.ids for r in rollouts],
            authors=[[r.writers[a] for a in r.author] for r in rollouts],
            interventions=[r.interventions for r in rollouts],
            trainer_state=self.callbacks.state,
        )
        if is_batch:  # what is logged beside the batch's completions, after an evaluation too
            self.extra = scores.extra
        return scores.rewards.numpy(), scores.metrics

    def items(self, rollouts: Sequence[Rollout], rewards: np.ndarray, advantage: torch.Tensor) -> list[Item]:
        """Each rollout with its loss mask, advantage, old (and reference) log-probs."""
        kept = ~np.isnan(rewards) & ~advantage.isnan().numpy()
        if self.args.mask_truncated_completions:
            kept &= [r.finish != "length" for r in rollouts]
        masks = [self.method.loss_mask(r) & k for r, k in zip(rollouts, kept, strict=True)]
        return self.learner.items(rollouts, masks, advantage.nan_to_num().tolist(), kept)

    def parts(self, items: list[Item]) -> Iterator[list[Item]]:
        """The batch's optimiser steps: whole groups, ``num_iterations`` passes in one order."""
        size = self.args.prompts_per_step * self.args.num_generations
        for _ in range(self.args.num_iterations):
            for start in range(0, len(items), size):
                yield items[start : start + size]

    def update(self, items: list[Item]) -> dict[str, float]:
        """One optimiser step on the whole list."""
        return self.learner.update(items, self.denominator(items), self.step)

    def denominator(self, items: Sequence[Item]) -> float:
        """What the loss type divides by, over the whole batch, zero-advantage groups included; at least 1."""
        kept = [i for i in items if i.kept]
        if self.args.loss_type in ("dapo", "cispo"):
            return max(1, sum(int(self.method.denominator_mask(i.rollout).sum()) for i in kept))
        if self.args.loss_type == "grpo":
            return max(1, sum(bool(i.mask.any()) for i in kept))
        return max(1, len(kept))

    # -- parts

    def _freeze(self) -> None:
        """Only the policy trains; a module that it shares with a frozen role keeps its adapter trainable."""
        for name, model in self.models.items():
            if model.module is not self.policy.module:
                model.module.requires_grad_(False)
            elif model is not self.policy and model.adapter != "off":
                raise ValueError(f"models: got one module as {self.method.policy!r} and {name!r}, need two, or 'base'")

    def _total_steps(self) -> int:
        args = self.args
        if args.max_steps > 0:
            return args.max_steps
        return self.cursor.num_steps(args.num_train_epochs) * args.steps_per_generation * args.num_iterations

    def describe(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Lengths, speed and hand-offs."""
        lengths = [len(r.ids) for r in rollouts]
        stats = self.engine.stats()
        return {
            "num_tokens": sum(lengths),
            "tokens_per_s/rollout": stats["tokens_per_s"],
            "completions/mean_length": float(np.mean(lengths)),
            "completions/max_length": max(lengths),
            "completions/clipped_ratio": float(np.mean([r.finish == "length" for r in rollouts])),
            "handoff/count": stats["handoffs"],
            "handoff/latency_ms": stats["handoff_latency_ms"],
            "handoff/catch_up_tokens": stats["catch_up"],
            "engine/preemptions": stats["preemptions"],
            "engine/cached_tokens": stats["cached"],
        }

    @staticmethod
    def rate(rollouts: Sequence[Rollout], since: float) -> float:
        return sum(len(r.ids) for r in rollouts) / (perf_counter() - since)

    def evaluate(self) -> dict[str, float]:
        """One row under ``eval/``: each of the method's schedules on the evaluation prompts, one sample each."""
        row: dict[str, Any] = {"step": self.step}
        prompts = [r["prompt"] for r in self.eval_rows]
        for name, schedule in self.method.schedules().items():

            def score(rollouts):
                return self.rewards(rollouts, self.eval_rows)[0]

            settings = dict(seed=self.args.seed, chat_template_kwargs=self.args.chat_template_kwargs)
            settings["skip_special_tokens"] = self.args.skip_special_tokens
            result, rollouts = evaluate(self.engine, prompts, score, schedule, self.args.sampling, **settings)
            row |= {f"eval/{name}/{k}": v for k, v in result.items()}
            if isinstance(schedule, Solo):
                for reader, model in self.models.items():
                    if reader != self.method.policy:
                        row[f"eval/legibility/{reader}"] = legibility(model, rollouts, self.engine.vocab_size)
        return self.run_log.write(row, is_step=False)

    def log(self, row: dict[str, Any], rollouts: Sequence[Rollout], rewards: np.ndarray) -> None:
        self.run_log.write({"step": self.step} | row)
        if self.args.log_completions and self.step % self.args.logging_steps == 0:
            shown = self.args.num_completions_to_print
            facts = [
                {"step": self.step, "prompt": self.batch_rows[r.group]["prompt"], "reward": finite(reward)}
                | {k: v[i] for k, v in self.extra.items()}
                for i, (r, reward) in enumerate(zip(rollouts, rewards.tolist(), strict=True))
            ]
            self.run_log.completions(rollouts, self.engine.tokenizer, shown, facts)

    def checkpoint(self) -> None:
        """A checkpoint between two rollout batches; the KV cache starts cold here, in this run as in a resumed one."""
        self.engine.forget()
        self.method.forget()
        state = {"cursor": self.cursor.state_dict(), "method": self.method.state_dict()}
        name = self.method.policy
        args, root = self.args, self.run_log.folder
        save_checkpoint(root, self.step, {name: self.learner}, {name: self.engine.tokenizer}, state, args.to_dict())
        prune(root, args.save_total_limit)

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint; rows of metrics.jsonl beyond it are dropped."""
        state = load_checkpoint(folder, {self.method.policy: self.learner})
        self.cursor.load_state_dict(state["cursor"])
        self.method.load_state_dict(state.get("method", {}))
        self.step = state["step"]
        self.run_log.rewind(self.step)


def _completion(prompt: Any, rollout: Rollout) -> Any:
    """The response as the prompt came: text for text, a message for messages, ids where there is no tokenizer."""
    if rollout.text is None:
        return rollout.ids
    is_chat = not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], dict)
    return [{"role": "assistant", "content": rollout.text}] if is_chat else rollout.text
