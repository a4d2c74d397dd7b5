"""Settings: frozen dataclasses and nothing else. Names follow TRL where it has one; batch size is in prompts."""

from __future__ import annotations

import re
import warnings
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar


def require(ok: bool, name: str, got: Any, need: str) -> None:
    """Raise ``ValueError("<name>: got <got>, need <need>")`` unless ``ok``."""
    if not ok:
        raise ValueError(f"{name}: got {got!r}, need {need}")


_UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("kMGT", 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)},
}
_UNITS["KB"] = _UNITS["kB"]


def parse_memory(text: str | int, name: str = "kv_memory") -> int:
    """Bytes of ``"1GiB"``, ``"512 MiB"``, ``"2.5GB"`` or a plain number; ``ValueError`` for anything else."""
    need = 'a positive size such as "1GiB", "512MiB", "2.5GB" or a number of bytes'
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    require(match is not None and match[2] in _UNITS, name, text, need)
    size = int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    require(size >= 1, name, text, need)
    return size


@dataclass(frozen=True)
class SamplingParams:
    """How one rollout is sampled: temperature, then top-k, top-p, min-p, then Gumbel-max over what is kept."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 256
    stop: tuple[str, ...] | str | None = None  # strings; the token that completes one is kept
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        require(self.temperature >= 0, "temperature", self.temperature, ">= 0")
        require(self.top_k >= 0, "top_k", self.top_k, ">= 0 (0 keeps all)")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, ">= 1")
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        require(all(isinstance(s, str) and s for s in stops), "stop", self.stop, "non-empty strings")
        object.__setattr__(self, "stop", stops)

    @property
    def truncates(self) -> bool:
        """True if top-k, top-p or min-p remove part of the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True)
class TrainConfig:
    """Settings that every method shares."""

    loss_types: ClassVar[tuple[str, ...]] = ("dapo", "grpo", "dr_grpo", "cispo")
    trainer_logprobs: ClassVar[bool] = False  # old log-probs always from the trainer's forward, never the engine's

    output_dir: str = "out"  # metrics.jsonl, checkpoints and the final models
    prompts_per_step: int = 16  # prompts per optimiser step (not rows: no divisibility rule)
    num_generations: int = 8  # rollouts per prompt, the group size G
    max_completion_length: int = 256  # new tokens per rollout
    max_steps: int = -1  # optimiser steps; -1 takes num_train_epochs
    num_train_epochs: float = 1.0
    shuffle: bool = True  # a new permutation of the prompts each epoch, from the seed
    seed: int = 0

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    learning_rate: float = 1e-6
    lr_scheduler_type: str = "constant"  # constant | linear | cosine, after the warm-up
    warmup_steps: int = 0
    warmup_ratio: float = 0.0  # the warm-up as a part of the run, where warmup_steps is 0
    min_lr_rate: float = 0.0  # part of the learning rate that linear and cosine end at
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    epsilon: float = 0.2  # clip_low
    epsilon_high: float | None = None  # clip_high; None takes epsilon; with cispo the bound of the ratio itself
    delta: float | None = None  # dual clip: a ratio above it pushes no further where the advantage is negative
    importance_sampling_level: str = "token"  # token | sequence: one ratio per rollout (GSPO)
    beta: float = 0.0  # weight of the k3 KL to the reference (the starting weights)
    loss_type: str = "dapo"  # dapo, cispo: mean over tokens | grpo: of sequence means | dr_grpo: sum / (N * max length)
    scale_rewards: str | bool = "group"  # group: divide by the group's std | none
    reward_weights: tuple[float, ...] | None = None
    mask_truncated_completions: bool = False  # leave rollouts without EOS out of the loss
    num_iterations: int = 1  # passes over each rollout batch
    steps_per_generation: int = 1  # optimiser steps that one rollout batch is split into

    micro_batch_tokens: int = 16384  # packed tokens per forward; never changes the loss
    gradient_checkpointing: bool = False
    kv_memory: str = "1GiB"  # both models' KV pools together
    block_size: int = 16
    token_budget: int = 8192  # new tokens per engine forward (prompts are prefilled in chunks)
    device: str | None = None

    eval_steps: int = 0  # 0: only where an eval_dataset is given, at the end
    save_steps: int = 0  # 0: only the final model
    save_total_limit: int | None = None  # checkpoints to keep, the newest
    logging_steps: int = 10
    report_to: str | tuple[str, ...] = "none"
    log_completions: bool = False
    num_completions_to_print: int = 2
    skip_special_tokens: bool = True  # in the text that reward functions see
    chat_template_kwargs: dict | None = None
    model_init_kwargs: dict | None = None
    disable_tqdm: bool = False  # no live progress; metrics.jsonl is always written

    def __post_init__(self) -> None:
        require(self.num_generations >= 2, "num_generations", self.num_generations, ">= 2: advantages are relative")
        for name in (
            "prompts_per_step max_completion_length num_iterations steps_per_generation block_size "
            "micro_batch_tokens token_budget logging_steps"
        ).split():
            require(getattr(self, name) >= 1, name, getattr(self, name), ">= 1")
        require(self.max_steps == -1 or self.max_steps >= 1, "max_steps", self.max_steps, "-1 or >= 1")
        require(self.temperature > 0, "temperature", self.temperature, "> 0 in training: greedy groups carry no signal")
        keep = self.save_total_limit
        require(keep is None or keep >= 1, "save_total_limit", keep, "None or >= 1")
        require(self.learning_rate >= 0, "learning_rate", self.learning_rate, ">= 0")
        require(0 < self.epsilon, "epsilon", self.epsilon, "> 0")
        require(self.beta >= 0, "beta", self.beta, ">= 0")
        require(self.loss_type in self.loss_types, "loss_type", self.loss_type, " or ".join(self.loss_types))
        levels, level = ("token", "sequence"), self.importance_sampling_level
        require(level in levels, "importance_sampling_level", level, " or ".join(levels))
        require(self.delta is None or self.delta > 1, "delta", self.delta, "None or > 1")
        if self.loss_type == "cispo":
            high = self.epsilon_high
            require(
                high is not None and high > 0, "epsilon_high", high, "> 0 with loss_type 'cispo', the largest ratio"
            )
            require(self.delta is None, "delta", self.delta, "None with loss_type 'cispo', which has no dual clip")
        if isinstance(self.scale_rewards, bool):  # as in TRL
            object.__setattr__(self, "scale_rewards", "group" if self.scale_rewards else "none")
        require(self.scale_rewards in ("group", "none"), "scale_rewards", self.scale_rewards, "group or none")
        for name in ("warmup_ratio", "min_lr_rate"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "in [0, 1]")
        kinds = ("constant", "linear", "cosine")
        require(self.lr_scheduler_type in kinds, "lr_scheduler_type", self.lr_scheduler_type, " or ".join(kinds))
        if self.sampling.truncates:
            got, untruncated = (self.top_k, self.top_p, self.min_p), self.on_policy and self.beta == 0
            need = "0, 1, 0 where a batch is reused or beta > 0: the ratio of a truncated law is not the policy's"
            require(untruncated, "top_k, top_p, min_p", got, need)
            message = f"top_k, top_p, min_p: got {got}; rollouts are truncated, the loss is that of the whole law"
            warnings.warn(message, stacklevel=3)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p, self.max_completion_length)

    @property
    def clip(self) -> tuple[float, float]:
        """(clip_low, clip_high): the ratio is held in [1 - clip_low, 1 + clip_high]."""
        if self.loss_type == "cispo":
            return 1.0, self.epsilon_high - 1
        return self.epsilon, self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def kl_weight(self) -> float:
        """Weight of the KL to the starting weights; above 0 a copy of them is kept."""
        return self.beta

    @property
    def on_policy(self) -> bool:
        """True if each rollout is used for one optimiser step, the one right after it was sampled."""
        return self.num_iterations == 1 and self.steps_per_generation == 1

    def has_gradient(self, advantage: float) -> bool:
        """Whether a rollout of this advantage can have a gradient; those without are not read at all."""
        return advantage != 0 or self.kl_weight > 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class GRPOConfig(TrainConfig):
    """One policy, one verifiable reward."""


@dataclass(frozen=True)
class TandemConfig(TrainConfig):
    """A trained senior and a frozen junior write each rollout in turns (arXiv 2606.28166)."""

    p: float = 0.5  # probability that a draw names the senior
    max_gap: int = 32  # tokens without a boundary after which the author is redrawn anyway
    schedule: Any = None  # a schedule object; None is Word(("senior", "junior"), p, max_gap)
    denominator: str = "senior"  # tokens that the loss is averaged over: senior | response

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.p <= 1, "p", self.p, "in [0, 1]")
        require(self.max_gap >= 1, "max_gap", self.max_gap, ">= 1")
        require(self.denominator in ("senior", "response"), "denominator", self.denominator, "senior or response")
        counts_tokens = self.denominator == "senior" or self.loss_type in ("dapo", "cispo")
        require(counts_tokens, "denominator", f"'response' with loss_type {self.loss_type!r}", "loss_type 'dapo'")
        default = (self.p, self.max_gap) == (0.5, 32)
        require(self.schedule is None or default, "p, max_gap", (self.p, self.max_gap), "none beside a schedule")


PARITY = {  # what published code does where our defaults differ (corl spec 2.2, 2.3; parity.py)
    "corl-ff476f0": {
        "grader": "corl-ff476f0",
        "tie": "first",
        "min_votes": 1,
        "vote_denominator": "parsed",
        "unlabelled": "zero",
        "denominator": "all",
        "loss_type": "bnpo",
    }
}


@dataclass(frozen=True)
class CoRLConfig(TrainConfig):
    """Independent models, each rewarded by agreeing with a peer's majority answer; no label anywhere."""

    loss_types: ClassVar[tuple[str, ...]] = (*TrainConfig.loss_types, "bnpo")

    prompts_per_step: int = 64
    max_completion_length: int = 1024
    lr_scheduler_type: str = "cosine"
    warmup_ratio: float = 0.03
    min_lr_rate: float = 0.1

    labels: Any = None  # a name (labels.make_labels, confidence.KINDS) or an object; None: pair, ring for N > 2
    label_options: dict | None = None  # of the named provider: order, gamma, margin, guard, inner
    num_votes: int | None = None  # rollouts that vote, >= num_generations; None: as many as are trained
    tie: str = "abstain"  # abstain | peer_assist | logprob | first (in rollout order)
    min_votes: int = 2  # the majority needs at least this many
    vote_threshold: float = 0.0  # and this share; "weighted" (its margin) and "soft" take no notice
    vote_denominator: str = "votes"  # of all votes, or "parsed": of those with an answer
    truncated_votes: bool = True  # whether a rollout cut off by length may vote
    grader: Any = "math"  # math | choice | number | text, or a function: response -> str, number, tuple, … (None: none)
    views: dict | None = None  # model -> column that it reads the question from; default "prompt"
    drop_missing: bool = False  # leave out questions that a view lacks; else they are an error
    unlabelled: str = "drop"  # prompts without a label: drop | zero (train as if every answer were wrong)
    denominator: str = "active"  # tokens that the loss is averaged over: active (of groups with signal) | all
    bnpo_rows: int = 1  # loss_type "bnpo": rollouts whose tokens share a mean (TRL's per-device batch)
    ema: tuple[float, ...] = (0.99, 0.9999)  # labels="ema": how slowly the teacher follows, at the start and the end
    alarms: bool = True  # a model that collapses stops being updated and goes on voting
    gold_column: str = "answer"  # taken out of the training data; seen by labels="gold" and by monitors only
    parity: str | None = (
        None  # "corl-ff476f0": vote, grade and average as the published code does (PARITY, no other values)
    )

    def __post_init__(self) -> None:
        require(self.parity is None or self.parity in PARITY, "parity", self.parity, " or ".join(["None", *PARITY]))
        default = {f.name: f.default for f in fields(self)}
        for name, value in PARITY.get(self.parity, {}).items():
            got = getattr(self, name)
            need = f"{value!r}, or none given, with parity {self.parity!r}"
            require(got in (value, default[name]), name, got, need)
            object.__setattr__(self, name, value)
        super().__post_init__()
        G, V = self.num_generations, self.num_votes
        require(V is None or V >= G, "num_votes", V, f"None or >= {G}, num_generations")
        kinds = ("math", "choice", "number", "text")
        known = self.parity or callable(self.grader) or self.grader in kinds
        require(bool(known), "grader", self.grader, f"{' or '.join(kinds)}, or a function")
        passes = (self.num_iterations, self.steps_per_generation)
        require(self.on_policy, "num_iterations, steps_per_generation", passes, "1, 1 for method 'corl'")
        for name, kinds in {
            "tie": ("abstain", "peer_assist", "logprob", "first"),
            "vote_denominator": ("votes", "parsed"),
            "unlabelled": ("drop", "zero"),
            "denominator": ("active", "all"),
        }.items():
            require(getattr(self, name) in kinds, name, getattr(self, name), " or ".join(kinds))
        require(self.min_votes >= 1, "min_votes", self.min_votes, ">= 1")
        require(0 <= self.vote_threshold <= 1, "vote_threshold", self.vote_threshold, "in [0, 1]")
        require(self.bnpo_rows >= 1, "bnpo_rows", self.bnpo_rows, ">= 1")
        ends = len(self.ema) == 2 and all(0 <= a <= 1 for a in self.ema)
        require(ends, "ema", self.ema, "two numbers in [0, 1]")
        if self.beta:
            need = "'all' with beta > 0: the KL term of groups without signal stays"
            require(self.denominator == "all", "denominator", self.denominator, need)
            require(self.loss_type != "bnpo", "loss_type", "bnpo", "another with beta > 0")

    @property
    def vote(self) -> dict[str, Any]:
        """The options of ``ballots.tally``."""
        names = {"threshold": self.vote_threshold, "denominator": self.vote_denominator}
        return {"tie": self.tie, "min_votes": self.min_votes, **names}


@dataclass(frozen=True)
class MInTRLConfig(TrainConfig):
    """A verifier cuts some rollouts at their first wrong step and inserts a short correction; the policy's log-ratio is
    regressed on the advantage (arXiv 2609.12419). With ``num_controls == num_generations`` it is PMD-mean.

    What the paper leaves open was chosen in the mintrl spec, 2.9. ``kappa`` None is the median log-prob of the policy's
    own tokens in the first batch. The bounds of the interventions are those of :class:`fastcollab.schedules.Intervene`.
    """

    loss_types: ClassVar[tuple[str, ...]] = ("regression",)
    trainer_logprobs: ClassVar[bool] = True

    num_generations: int = 16  # rollouts per prompt, controls and reviewed ones
    num_controls: int = 8  # of these, never reviewed: they alone make the baseline
    loss_type: str = "regression"
    scale_rewards: str | bool = "none"
    beta: float = 1e-3  # the regression's: nats of log-ratio per reward are 1 / beta
    anchor: str = "const"  # of the verifier's tokens: const (kappa) | proxy (the policy's own log-prob)
    kappa: float | None = None  # <= 0
    anchor_guard: bool = False  # const: no anchor below the policy's own log-prob
    logprob_floor: float = -50.0  # proxy: log-probs below it count as it, without a gradient
    length_norm: str | None = None  # divides the squared residual: None | seq (by the rollout's tokens) | max
    baseline: str = "mean"  # mean | loo | soft
    intervention_updates: int = 200  # optimiser steps with reviewed rollouts; then all rollouts are controls
    skip_flat: bool = False  # leave out rollouts whose advantage is 0: regularisation, and with const anchors the bonus

    chunk: int = 64
    longest_chunk: int = 256
    max_reviews: int = 8
    max_interventions: int = 4
    max_correction_tokens: int = 32
    reserve: int = 16
    correction_cap: float = 1.0  # largest part of max_completion_length that corrections may fill
    rollback: str = "chunk"
    steps: Any = "text"  # text | code | a compiled pattern | a function | a Steps object
    leaks: Any = (
        None  # whether a correction gives the answer away: function of text and row; None: corrections.gives_answer
    )
    template: Any = None  # of a local model as the verifier: verifiers.Template, e.g. Template(privileged="solution")
    external_share: tuple[float, float] | None = (0.02, 0.04)  # band that max_reviews and max_correction_tokens are
    # steered into, from their settings downwards; None: they stay
    sign_flip_limit: float = (
        0.05  # a warning above this share of corrected rollouts whose constant anchors turn A's sign
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        G, K = self.num_generations, self.num_controls
        require(1 <= K <= G, "num_controls", K, f"in 1..{G}, num_generations")
        require(self.beta > 0, "beta", self.beta, "> 0 for method 'mintrl'")
        require(self.anchor in ("const", "proxy"), "anchor", self.anchor, "const or proxy")
        constant = self.anchor == "const"
        require(self.kappa is None or constant, "kappa", self.kappa, "None with anchor 'proxy'")
        require(self.kappa is None or self.kappa <= 0, "kappa", self.kappa, "None or <= 0, a log-prob")
        require(constant or not self.anchor_guard, "anchor_guard", self.anchor_guard, "False with anchor 'proxy'")
        require(self.length_norm in (None, "seq", "max"), "length_norm", self.length_norm, "None, seq or max")
        require(self.baseline in ("mean", "loo", "soft"), "baseline", self.baseline, "mean, loo or soft")
        alone = self.baseline == "loo" and K < 2
        require(not alone, "num_controls", K, ">= 2 with baseline 'loo'")
        require(self.scale_rewards == "none", "scale_rewards", self.scale_rewards, "none for method 'mintrl'")
        unclipped = (self.epsilon_high, self.delta, self.importance_sampling_level) == (None, None, "token")
        need = "none of them for method 'mintrl': no ratio is clipped"
        require(unclipped, "epsilon_high, delta, importance_sampling_level", "other settings", need)
        require(self.intervention_updates >= 0, "intervention_updates", self.intervention_updates, ">= 0")
        require(self.logprob_floor < 0, "logprob_floor", self.logprob_floor, "< 0: no log-prob lies above 0")
        per_batch = self.num_iterations * self.steps_per_generation
        whole = K == G or self.intervention_updates % per_batch == 0
        need = f"a multiple of {per_batch}, the optimiser steps of one rollout batch"
        require(whole, "intervention_updates", self.intervention_updates, need)
        band = self.external_share
        ok = band is None or len(band) == 2 and 0 <= band[0] < band[1] <= 1
        require(ok, "external_share", band, "None or two shares, the lower first")
        require(0 <= self.sign_flip_limit <= 1, "sign_flip_limit", self.sign_flip_limit, "in [0, 1]")

    @property
    def kl_weight(self) -> float:
        return 0.0

    def has_gradient(self, advantage: float) -> bool:
        return advantage != 0 or not self.skip_flat

    @property
    def intervenes(self) -> bool:
        return self.num_controls < self.num_generations and self.intervention_updates > 0
