"""Callbacks: the trackers and ``TrainerCallback`` objects of transformers, driven by our loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from fastcollab.config import TrainConfig


class _Arguments(SimpleNamespace):
    """Our settings as the attributes and methods that trackers read from ``TrainingArguments``."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    to_sanitized_dict = to_dict

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), default=str)


class Callbacks:
    """``callbacks`` are ``TrainerCallback`` objects or functions of a metrics row; ``args.report_to`` names trackers.

    ``stop`` becomes True when a callback sets ``control.should_training_stop``.
    """

    def __init__(
        self, callbacks: Sequence[TrainerCallback | Callable], args: TrainConfig, model, tokenizer, optimizer, schedule
    ) -> None:
        self.functions = [c for c in callbacks if not isinstance(c, TrainerCallback)]
        trackers = get_reporting_integration_callbacks(args.report_to if args.report_to != "none" else [])
        objects = [DefaultFlowCallback, *trackers, *(c for c in callbacks if isinstance(c, TrainerCallback))]
        self.handler = CallbackHandler(objects, model, tokenizer, optimizer, schedule)
        own = dict(
            run_name=args.output_dir, logging_dir=args.output_dir, logging_first_step=True, logging_strategy="steps"
        )
        own |= dict(eval_strategy="no", save_strategy="no", eval_delay=0, process_index=0, disable_tqdm=True)
        self.args = _Arguments(**own | args.to_dict())
        self.state = TrainerState(is_local_process_zero=True, is_world_process_zero=True)
        self.control = TrainerControl()

    @property
    def stop(self) -> bool:
        return self.control.should_training_stop

    def begin(self, max_steps: int, step: int = 0) -> None:
        self.state.max_steps, self.state.global_step = max_steps, step
        self.control = self.handler.on_train_begin(self.args, self.state, self.control)

    def log(self, row: dict[str, Any], step: int, is_step: bool) -> None:
        """One metrics row, of an optimiser step or an evaluation: trackers see its numbers, functions the whole."""
        self.state.global_step = step
        self.state.log_history.append(row)
        if is_step:
            self.control = self.handler.on_step_end(self.args, self.state, self.control)
        numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
        self.control = self.handler.on_log(self.args, self.state, self.control, numbers)
        for function in self.functions:
            function(row)

    def end(self) -> None:
        self.control = self.handler.on_train_end(self.args, self.state, self.control)
