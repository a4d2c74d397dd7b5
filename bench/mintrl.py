"""What a verifier costs: reviewed rollouts beside solo ones, and beside a loop that keeps nothing between reviews.

Policy and verifier are random models of one size, so their verdicts would be noise: a script says what each verdict
means, after the model has chosen as often as a real one would (``Script``). Corrections are the verifier's own. All
variants are greedy, so that the loop must write the ids that the engine writes; every run starts with empty caches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as token_models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import fastcollab as fc
from fastcollab import verifiers
from fastcollab.bench import models
from fastcollab.bench.harness import headline, interleave, measure_floors, save, table
from fastcollab.bench.reprefill import Reprefill
from fastcollab.model_verifier import ModelVerifier
from fastcollab.schedules import Intervene
from fastcollab.steps import Steps
from fastcollab.verifiers import Keep, Request, Revise, Verdict

SOLO, REVIEWED, REPREFILL = "(a) solo", "(b) reviewed", "(c) loop, re-prefill"
STEP = 30  # tokens of a step, about: one in as many ids ends it
EVERY = 5  # of so many reviews of a row one is scripted to revise
MOST_S = 200.0  # for the repeats of one variant


@dataclass(frozen=True)
class Case:
    """Rollouts that are timed together."""

    rows: int
    new_tokens: int
    rounds: int = 3
    prompt: int = 64  # tokens a prompt
    chunk: int = 64
    max_tokens: int = 18  # of a correction


CASES = (
    Case(rows=8, new_tokens=384, max_tokens=12),
    Case(rows=32, new_tokens=512),
    Case(rows=32, new_tokens=1024),
    Case(rows=32, new_tokens=2048),
)


@lru_cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over the documentation that Python ships and the verifier's instructions: 9,400 ids.

    As in large vocabularies, some ids end a sentence and its paragraph with it.
    """
    made = Tokenizer(token_models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    texts = [topics[name] for name in sorted(topics)] + [str(vars(verifiers.Template()))] * 4
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=models.VOCAB, special_tokens=["<end>"],
                             initial_alphabet=alphabet, show_progress=False))  # fmt: skip
    result = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    ends = [result.decode([i]) + ".\n\n" for i in words(result)[::STEP]]
    result.add_tokens([AddedToken(text, normalized=False) for text in ends])
    return result


def words(tokens: PreTrainedTokenizerFast) -> list[int]:
    """Ids of whole words with the space before them: a text of such is encoded as it was written."""
    return sorted(i for s, i in tokens.get_vocab().items() if s[0] == "Ġ" and s[1:].isalpha() and s[1:].islower())


def step_ends(tokens: PreTrainedTokenizerFast) -> list[int]:
    return sorted(i for s, i in tokens.get_added_vocab().items() if s.endswith("\n"))


def writer(seed: int, tokens: PreTrainedTokenizerFast, **shape: Any) -> PreTrainedModel:
    """A random model that writes words and ends of steps; other ids keep a tenth of their logit."""
    model = models.random_model(seed, std=0.07, **shape)
    scale = torch.full((model.config.vocab_size, 1), 0.1)
    scale[words(tokens)] = scale[step_ends(tokens)] = 1.0
    model.config.eos_token_id = model.generation_config.eos_token_id = tokens.eos_token_id
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(scale)
    return model


class Script:
    """The verdicts: one in ``every`` reviews of a row revises, in a step that differs from row to row.

    It takes no forward away: the model still chooses between KEEP and REVISE, and then a number where the script
    revises, but whatever it chooses means the scripted verdict.
    """

    def __init__(self, tokens: PreTrainedTokenizerFast, every: int = EVERY) -> None:
        self.tokens, self.every = tokens, every
        self.turns: Counter[int] = Counter()

    def __call__(self, request: Request) -> dict[tuple[int, ...], Verdict]:
        row = request.row["row"]
        turn, self.turns[row] = self.turns[row], self.turns[row] + 1
        keep, *revise = verifiers.verdict_choices(self.tokens, request, self.tokens.eos_token_id)
        if (turn - row) % self.every:
            return {keep: Keep(), revise[0]: Keep()}
        verdict = Revise(request.first + row % len(revise))
        return {path: verdict for path in revise + [(keep[0], *path[1:]) for path in revise]}


class Runs:
    """The variants of one case over one pair of models."""

    def __init__(self, case: Case, policy: PreTrainedModel, verifier: PreTrainedModel, device: str = "cpu") -> None:
        self.case, self.tokens = case, tokenizer()
        self.script = Script(self.tokens)
        reads = dict(tokenizer=self.tokens, max_tokens=case.max_tokens, choices=self.script)
        self.policy = fc.Engine({"policy": policy}, self.tokens)
        self.verifier = ModelVerifier(verifier, **reads)
        steps = Steps(self.tokens)
        most = case.new_tokens // case.chunk
        settings = dict(chunk=case.chunk, max_tokens=case.max_tokens, steps=steps, max_reviews=most,
                        max_interventions=most)  # fmt: skip
        self.schedule = Intervene(verifier=self.verifier, **settings)
        cold = fc.Engine({"policy": policy}, self.tokens, prefix_cache=False)
        self.loop = Reprefill(
            cold, Intervene(verifier=ModelVerifier(verifier, prefix_cache=False, **reads), **settings)
        )
        which = torch.tensor(words(self.tokens))
        places = models.random_prompts(case.rows, case.prompt, len(which))
        self.prompts = [which[torch.tensor(place)].tolist() for place in places]
        self.rows = [{"row": i} for i in range(case.rows)]
        self.sampling = fc.SamplingParams(temperature=0.0, max_new_tokens=case.new_tokens, ignore_eos=True)

    def solo(self) -> list[list[int]]:
        self.policy.forget()
        return [r.ids for r in self.policy.generate(self.prompts, sampling=self.sampling)]

    def reviewed(self) -> list[list[int]]:
        for cache, engine in ((self.policy, self.policy), (self.verifier, self.verifier.engine)):
            cache.forget()
            engine.reset_stats()
        self.script.turns.clear()
        self.rollouts = self.policy.generate(
            self.prompts, schedule=self.schedule, sampling=self.sampling, rows=self.rows
        )
        self.stats = self.policy.stats(), self.verifier.engine.stats()
        return [r.ids for r in self.rollouts]

    def reprefill(self) -> list[list[int]]:
        self.script.turns.clear()
        for engine in (self.loop.engine, self.loop.verifier.engine):
            engine.reset_stats()
        self.loop.learn(self.rollouts)
        return self.loop(self.prompts, self.rows, self.case.new_tokens)

    def calls(self) -> dict[str, Callable[[], Any]]:
        return {SOLO: self.solo, REVIEWED: self.reviewed, REPREFILL: self.reprefill}

    def figures(self) -> dict[str, Any]:
        """What the last reviewed run did, and what the loop read."""
        found, (policy, verifier) = self.rollouts, self.stats
        cuts = [cut for r in found for cut in r.interventions]
        tokens, dropped = sum(len(r.ids) for r in found), sum(len(cut.dropped) for cut in cuts)
        external = [int((r.author == 1).sum()) for r in found]
        return {
            "reviews": sum(len(r.reviews) for r in found),
            "chunk_tokens": (tokens + dropped) / (len(found) + sum(len(r.reviews) for r in found)),
            "interventions": len(cuts),
            "outcomes": dict(Counter(review.outcome for r in found for review in r.reviews)),
            "external_share": sum(external) / tokens,
            "external_share_macro": sum(n / len(r.ids) for n, r in zip(external, found, strict=True)) / len(found),
            "dropped_share": dropped / (dropped + tokens),
            "unread": sum(r.unread for r in found),
            "read_per_token": verifier["tokens"] / tokens,
            "policy_read_per_token": policy["tokens"] / tokens,
            "loop_read_per_token": self.loop.verifier.engine.stats()["tokens"] / tokens,
            "loop_policy_read_per_token": self.loop.engine.stats()["tokens"] / tokens,
            "policy_forwards": policy["forwards"],
            "verifier_forwards": verifier["forwards"],
        }


def run_case(case: Case, policy: PreTrainedModel, verifier: PreTrainedModel, device: str = "cpu") -> dict[str, Any]:
    """All variants interleaved; compares the ids that they wrote last."""
    runs, ids = Runs(case, policy, verifier), {}
    calls = runs.calls()
    written = {name: (lambda name=name: ids.update({name: calls[name]()})) for name in calls}
    timings = interleave(written, case.rounds, MOST_S, device)
    equal = sum(map(list.__eq__, ids[REVIEWED], ids[REPREFILL]))
    speed = {name: sum(map(len, ids[name])) / t.wall for name, t in timings.items()}
    cpu = {name: t.cpu for name, t in timings.items()}
    return {
        **vars(case),
        "of_solo": speed[REVIEWED] / speed[SOLO],
        "of_reprefill": speed[REVIEWED] / speed[REPREFILL],
        "of_solo_by_cpu": cpu[SOLO] / cpu[REVIEWED],
        "of_reprefill_by_cpu": cpu[REPREFILL] / cpu[REVIEWED],
        "rows_equal": equal,
        **runs.figures(),
        "variants": {name: {"tokens_per_s": speed[name], **t.to_dict()} for name, t in timings.items()},
    }


def show(results: list[dict[str, Any]]) -> str:
    cells = [
        [
            f"{v['rows']} rows, {v['new_tokens']} new, chunk {v['chunk']}",
            *(f"{v['variants'][name]['tokens_per_s']:.0f}" for name in (SOLO, REVIEWED, REPREFILL)),
            f"{v['of_solo']:.3f} ({v['of_solo_by_cpu']:.3f})",
            f"{v['of_reprefill']:.2f} ({v['of_reprefill_by_cpu']:.2f})",
            f"{v['reviews']}, {v['interventions']}",
            f"{v['external_share']:.2%}",
            f"{v['read_per_token']:.2f} ({v['loop_read_per_token']:.1f})",
            f"{v['dropped_share']:.2%}",
            f"{v['rows_equal']}/{v['rows']}",
            "/".join(str(len(t["walls_s"])) for t in v["variants"].values()),
        ]
        for v in results
    ]
    head = ["tokens/s", SOLO, REVIEWED, REPREFILL, "b ÷ a (by CPU time)", "b ÷ c", "reviews, cuts", "external",
            "reads a token (c)", "dropped", "rows b = c", "runs"]  # fmt: skip
    return table(head, cells)


def run(path: Path, quick: bool = False, device: str = "cpu") -> None:
    """Prints the table and writes the section ``mintrl``."""
    floors = measure_floors(device)
    print(headline(floors), flush=True)
    policy, verifier = (writer(seed, tokenizer()).to(device) for seed in (0, 1))
    first = Runs(CASES[0], policy, verifier)
    first.solo(), first.reviewed()  # warms up
    results = [run_case(case, policy, verifier, device) for case in (CASES[:1] if quick else CASES)]
    print(f"\n{show(results)}", flush=True)
    save("mintrl", {"floors": vars(floors), "cases": results}, path)
