"""MInTRL training: anchors, advantages and gradients against plain loops, the phases, the figures, whole runs."""

from __future__ import annotations

import dataclasses
import re
import warnings
import weakref

import numpy as np
import pytest
import torch
from training import equal, gradients, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

import fastcollab as fc
from fastcollab.trainer import Trainer
from fastcollab.verifiers import FunctionVerifier, Keep, Request, Revise, Template

LINES = re.compile("\n")
ROWS = fc.tiny.problems(6, seed=3)


def review(prompt, accepted, new):
    """Finds the second line wrong in every other first review."""
    return Revise(1) if not accepted and len(new) > 1 and len(prompt + new[0]) % 2 else Keep()


def correct(prompt, accepted, new):
    return " 2 + 2 = 4\n"


def reward(completions, **kwargs):
    """Right or wrong by a hash of the text, so that both arms have some of each."""
    return [float(sum(map(ord, text)) % 3 == 0) for text in completions]


def trainer(tmp_path, reward=reward, verifier=None, **changes):
    settings = dict(
        output_dir=str(tmp_path), prompts_per_step=3, num_generations=6, num_controls=3, max_completion_length=40,
        max_steps=3, learning_rate=1e-3, kv_memory="16MiB", disable_tqdm=True, chunk=8, longest_chunk=24,
        max_correction_tokens=12, reserve=2, steps=LINES, leaks=lambda text, row: False, external_share=None, beta=0.05,
        sign_flip_limit=1.0,
    )  # fmt: skip
    args = fc.MInTRLConfig(**settings | changes)
    models = {"policy": fc.tiny.senior()}
    if args.intervenes:
        models["verifier"] = FunctionVerifier(review, correct) if verifier is None else verifier
    return Trainer("mintrl", models, ROWS, reward, args, None, None, None, ())


def batch(t):
    """Rollouts, rewards, items before and after the anchors, and the row of figures."""
    rollouts = t.rollouts()
    rewards, _ = t.rewards(rollouts)
    advantage, row = t.method.advantages(rewards, rollouts)
    items = t.items(rollouts, rewards, advantage)
    anchored, more = t.method.anchored(items)
    return rollouts, rewards, items, anchored, row | more | t.method.metrics(rollouts, rewards)


def own_logprobs(module, rollout):
    """A plain forward: fp32 [len(ids)]."""
    ids = torch.tensor([rollout.prompt_ids + rollout.ids])
    logits = module(ids, use_cache=False).logits[0, len(rollout.prompt_ids) - 1 : -1]
    return logits[:, : len(fc.tiny.task.VOCABULARY)].log_softmax(-1).gather(1, torch.tensor(rollout.ids)[:, None])[:, 0]


def test_half_of_the_rollouts_are_reviewed_then_none(tmp_path):
    """K_c controls and K_s reviewed in the first phase, then as many rollouts, all controls (spec 2.6)."""
    t = trainer(tmp_path, intervention_updates=2)
    arms, verifier = [], weakref.ref(t.method.verifier)
    for _ in range(3):
        rollouts = t.rollouts()
        arms.append([[t.method.reviewed(r) for r in rollouts if r.group == g] for g in range(3)])
        t.step += 1
    assert arms == 2 * [3 * [[False] * 3 + [True] * 3]] + [3 * [[False] * 6]]
    assert verifier() is None  # unloaded: nothing holds it


def test_t14_the_baseline_knows_the_controls_alone(tmp_path):
    """Flipping a reviewed rollout's reward changes its own advantage and no other; a control's changes all of its."""
    t = trainer(tmp_path)
    rollouts = t.rollouts()
    rewards = np.arange(len(rollouts)) % 2.0
    before, _ = t.method.advantages(rewards, rollouts)
    controls = np.array([not t.method.reviewed(r) for r in rollouts])
    group = np.array([r.group for r in rollouts])
    for i in (0, 3, 8, 17):
        flipped = rewards.copy()
        flipped[i] = 1 - flipped[i]
        after, _ = t.method.advantages(flipped, rollouts)
        changed = (after != before).numpy()
        assert changed.tolist() == ((group == group[i]) if controls[i] else np.arange(18) == i).tolist()
    value = [rewards[controls & (group == g)].mean() for g in range(3)]
    assert before.tolist() == pytest.approx([r - value[g] for r, g in zip(rewards, group, strict=True)])


def test_unscored_rollouts_leave_and_a_prompt_without_controls_is_dropped(tmp_path):
    """6.20, 6.25: the baseline is of the controls that are left; none left: the prompt goes, no pooled mean."""
    t = trainer(tmp_path)
    rollouts = t.rollouts()
    rewards = np.array([np.nan, 1.0, 0.0, 1.0, np.nan, 0.0] + 3 * [np.nan] + 3 * [1.0] + 6 * [1.0])
    advantage, row = t.method.advantages(rewards, rollouts)
    nan = float("nan")
    expected = [nan, 0.5, -0.5, 0.5, nan, -0.5] + 6 * [nan] + 6 * [0.0]
    assert advantage.tolist() == pytest.approx(expected, nan_ok=True)
    assert row["mintrl/no_baseline"] == pytest.approx(8 / 18) and row["mintrl/flat"] == 0.5
    items = t.items(rollouts, rewards, advantage)
    assert [i.kept for i in items] == [not np.isnan(a) for a in expected] and t.denominator(items) == 10
    assert all(i.mask.all() if i.kept else not i.mask.any() for i in items)


def test_t10_proxy_begins_at_minus_the_advantage(tmp_path):
    """With the trainer's own anchors Lambda is 0; anchors of a sampler with a bias are seen at once."""
    t = trainer(tmp_path, anchor="proxy")
    *_, anchored, _ = batch(t)
    row = t.learner.update(anchored, t.denominator(anchored), 0)
    assert row["log_ratio"] == pytest.approx(0, abs=1e-4) and row["log_ratio_sq"] < 1e-8
    assert row["residual_sq"] == pytest.approx(np.mean([i.advantage**2 for i in anchored]), rel=1e-4)
    t = trainer(tmp_path, anchor="proxy")
    *_, anchored, _ = batch(t)
    for item in anchored:
        item.old_logprob = item.old_logprob - 0.01
    assert t.learner.update(anchored, t.denominator(anchored), 0)["log_ratio"] > 0.2


@pytest.mark.parametrize("anchor", ["proxy", "const"])
@pytest.mark.parametrize("changes", [{}, {"length_norm": "seq"}, {"length_norm": "max"}, {"micro_batch_tokens": 64}])
def test_the_gradient_is_a_plain_loops(tmp_path, anchor, changes):
    t = trainer(tmp_path, anchor=anchor, kappa=-1.0 if anchor == "const" else None, **changes)
    rollouts, rewards, _, anchored, _ = batch(t)
    assert any(r.interventions for r in rollouts) and any(i.advantage for i in anchored)
    got = gradients(t, anchored)
    module = t.policy.module
    module.zero_grad()
    controls = {
        g: [x for r, x in zip(rollouts, rewards, strict=True) if r.group == g and not t.method.reviewed(r)]
        for g in range(3)
    }
    for r, x in zip(rollouts, rewards, strict=True):
        logprob = own_logprobs(module, r)
        foreign = torch.tensor([r.writers[a] == "verifier" for a in r.author])
        a = torch.where(foreign, -1.0, logprob.detach()) if anchor == "const" else logprob.detach()
        e = 0.05 * (logprob - a).sum() - (x - np.mean(controls[r.group]))
        length = {"seq": len(r.ids), "max": 40}.get(changes.get("length_norm"), 1)
        (e**2 / 0.1 / length / len(rollouts)).backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(got[name], p.grad, atol=2e-6, rtol=2e-3, msg=name)


def test_t13_what_was_dropped_is_in_no_loss(tmp_path):
    """Other dropped ids leave the gradient bit for bit; another kept id of the verifier's changes it."""
    t = trainer(tmp_path, kappa=-1.0)
    rollouts = t.rollouts()
    rewards = np.arange(len(rollouts)) % 2.0
    advantage, _ = t.method.advantages(rewards, rollouts)

    def gradient():
        return dict(
            gradients(t, t.method.anchored(t.items(rollouts, rewards, advantage))[0])
        )  # a later call fills it again

    before = gradient()
    fixed = next(r for r, a in zip(rollouts, advantage.tolist(), strict=True) if r.interventions and a)
    at, dropped, inserted = fixed.interventions[0]
    fixed.interventions[0] = type(fixed.interventions[0])(at, tuple(reversed(dropped)) + dropped, inserted)
    assert equal(before, gradient())
    fixed.ids[at] = fixed.ids[at] + 1
    assert not equal(before, gradient())


def test_kappa_is_the_median_of_the_first_batch_and_stays(tmp_path):
    t = trainer(tmp_path)
    rollouts, _, items, _, row = batch(t)
    own = np.concatenate([own_logprobs(t.policy.module, r).detach().numpy()[r.author == 0] for r in rollouts])
    assert t.method.kappa == pytest.approx(np.median(own), abs=1e-5) and row["mintrl/kappa"] == t.method.kappa
    first = t.method.kappa
    t.step += 1
    batch(t)
    assert t.method.kappa == first


def test_figures_of_a_batch(tmp_path):
    """Shares, rates and outcomes, each counted anew from the rollouts."""
    t = trainer(tmp_path)
    rollouts, rewards, items, anchored, row = batch(t)
    reviewed = [r for r in rollouts if t.method.reviewed(r)]
    external = [sum(r.writers[a] == "verifier" for a in r.author) for r in reviewed]
    written, fixed = [len(r.ids) for r in reviewed], [r for r in reviewed if r.interventions]
    assert fixed and row["mintrl/external_share_micro"] == pytest.approx(sum(external) / sum(written))
    macro = np.mean([n / T for n, T in zip(external, written, strict=True)])
    assert row["mintrl/external_share_macro"] == pytest.approx(macro)
    assert row["mintrl/external_share_batch"] == pytest.approx(sum(external) / sum(len(r.ids) for r in rollouts))
    assert row["mintrl/interventions"] == len(fixed) / len(reviewed)
    assert row["mintrl/interventions_histogram"] == [len(reviewed) - len(fixed), len(fixed)]
    assert row["mintrl/reviews"] == sum(len(r.reviews) for r in reviewed) / len(reviewed)
    dropped = sum(len(i.dropped) for r in fixed for i in r.interventions)
    assert row["mintrl/dropped_share"] == pytest.approx(dropped / (dropped + sum(written)))
    right = {id(r): x >= 1 for r, x in zip(rollouts, rewards, strict=True)}
    assert row["mintrl/resume_success"] == np.mean([right[id(r)] for r in fixed])
    by_group = {
        g: [[right[id(r)] for r in rollouts if r.group == g and t.method.reviewed(r) == arm] for arm in (0, 1)]
        for g in range(3)
    }
    assert row["mintrl/lift"] == pytest.approx(np.mean([np.mean(s) - np.mean(c) for c, s in by_group.values()]))
    assert row["mintrl/rescue_hard"] == np.mean([any(s) and not any(c) for c, s in by_group.values()])
    assert row["mintrl/logprob/sampler_gap"] < 1e-4
    alien = np.concatenate([i.old_logprob[t.method.foreign(i.rollout)] for i in items])
    assert row["mintrl/logprob/external"] == pytest.approx(alien.mean(), abs=1e-6)


def test_sign_flips_are_counted_and_told(tmp_path):
    """Spec 2.5: large beta turns the sign of failed corrected rollouts; the warning names what to lower, once."""
    t = trainer(tmp_path, beta=5.0, kappa=0.0, sign_flip_limit=0.0, reward=lambda completions, **k: [0.0, 1.0] * 9)
    with pytest.warns(UserWarning, match="sign_flip_rate: got .*, need <= 0.0: lower beta \\(5\\) or kappa \\(0\\)"):
        _, _, items, anchored, row = batch(t)
    flips = []
    for i, a in zip(items, anchored, strict=True):
        if i.rollout.interventions:
            flips.append(i.advantage * (i.advantage + 5.0 * (a.old_logprob - i.old_logprob).sum()) < 0)
    assert row["mintrl/sign_flip_rate"] == np.mean(flips) > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        t.step += 1
        batch(t)
        proxy = trainer(tmp_path, anchor="proxy", sign_flip_limit=0.0)
        assert batch(proxy)[-1]["mintrl/sign_flip_rate"] == 0


def test_no_reviews_is_pmd_mean(tmp_path):
    """T17 and 7.7: without corrections both arms are the policy's own, Const is Proxy, and nothing needs a verifier."""
    alone = trainer(tmp_path, num_controls=6)
    kept = trainer(tmp_path, verifier=FunctionVerifier(lambda *a: Keep(), correct), num_controls=3)
    r0 = trainer(tmp_path, max_reviews=0)
    batches = [batch(t) for t in (alone, kept, r0)]
    for found in batches[1:]:
        assert [r.ids for r in found[0]] == [r.ids for r in batches[0][0]]
    const, proxy = (trainer(tmp_path, num_controls=6, anchor=a) for a in ("const", "proxy"))
    assert equal(*(gradients(t, batch(t)[3]) for t in (const, proxy)))


@pytest.mark.parametrize("anchor", ["proxy", "const"])
def test_a_batch_without_advantages(tmp_path, anchor):
    """6.21: nothing at the first step but the constant anchors' pull, which skip_flat leaves out; it steps anyway."""
    for skip in (False, True):
        t = trainer(tmp_path, reward=lambda completions, **k: [1.0] * len(completions), anchor=anchor, skip_flat=skip)
        *_, anchored, row = batch(t)
        assert row["mintrl/flat"] == 1.0 and not any(i.advantage for i in anchored)
        update = t.update(anchored)
        assert (update["grad_norm"] > 1e-4) == (anchor == "const" and not skip)
        assert ("num_loss_tokens" in update) == (not skip)


def test_whole_runs_resume_bitwise(tmp_path):
    """Two phases, steering on, a checkpoint in the first: the resumed run is the uninterrupted one."""
    changes = dict(max_steps=4, save_steps=2, intervention_updates=3, external_share=(0.0, 0.01), learning_rate=1e-3)
    held_out = fc.tiny.problems(2, seed=9)

    def run(folder, resume=False, **more):
        args = trainer(folder, **changes | more).args
        models = {"policy": fc.tiny.senior(), "verifier": FunctionVerifier(review, correct)}
        return fc.train("mintrl", models, ROWS, reward, args, eval_dataset=held_out, resume_from_checkpoint=resume)

    whole = run(tmp_path / "a")
    run(tmp_path / "b", max_steps=2)
    resumed = run(tmp_path / "b", resume=True)
    assert equal(weights(whole.models["policy"]), weights(resumed.models["policy"]))
    other = ("_s/", "time", "latency", "version")  # a loaded model counts its versions anew
    rows = [
        [{k: v for k, v in row.items() if not any(part in k for part in other)} for row in r.log_history]
        for r in (whole, resumed)
    ]
    assert [r["step"] for r in rows[0] if "reward" in r] == [1, 2, 3, 4]
    assert rows[0][:2] == rows[1][:2]
    steps = [[r for r in part if "reward" in r] for part in rows]
    for a, b in zip(*steps, strict=True):
        assert {k: (a.get(k), b.get(k)) for k in a.keys() | b.keys() if a.get(k) != b.get(k)} == {}
    assert "mintrl/reviews" in steps[0][2] and "mintrl/reviews" not in steps[0][3]
    assert "eval/solo/reward" in rows[0][-1]


@pytest.mark.parametrize("source", ["base", "policy", "other"])
def test_a_local_model_verifies(tmp_path, source):
    """The starting weights, the current ones, or another model; those of "policy" move, and what was read with the old
    ones is read anew."""
    template = Template(None, "check", "?", "go on")  # short: the tiny model's limit is 256 tokens
    args = trainer(tmp_path, max_correction_tokens=6, template=template, learning_rate=1e-2).args
    models = {"policy": fc.tiny.senior(), "verifier": fc.tiny.junior() if source == "other" else source}
    t = Trainer("mintrl", models, ROWS, reward, args, None, None, None, ())
    verifier, engine = t.method.verifier, t.method.verifier.engine
    one = engine.tokenizer.convert_tokens_to_ids("1")
    verifier.choices = lambda request: {(one, verifier.end_id): Revise(request.first)}  # it knows no words
    before = weights(engine.models["verifier"].module)
    rollouts, _, _, anchored, row = batch(t)
    assert any(r.interventions for r in rollouts) and row["mintrl/verifier_tokens_per_token"] > 0.5
    requests = [Request(ROWS[0]["prompt"], (), ("\n 1 + 1 = 2\n",))]
    verifier.correct(requests)
    t.update(anchored)
    moved = source == "policy"
    assert equal(before, weights(engine.models["verifier"].module)) == (not moved)
    engine.reset_stats()
    said = verifier.correct(requests)
    assert (engine.stats()["cached"] == 0) == moved
    t.method.forget()  # as at a checkpoint, which starts cold here and in the resumed run
    engine.reset_stats()
    assert verifier.correct(requests) == said and engine.stats()["cached"] == 0 and not verifier._read


def test_a_users_verifier_may_have_an_engine_that_is_none_of_ours(tmp_path):
    verifier = FunctionVerifier(review, correct)
    verifier.engine = "gpt-4"
    t = trainer(tmp_path, verifier=verifier)
    *_, row = batch(t)
    t.method.forget()
    assert "mintrl/reviews" in row and "mintrl/verifier_tokens_per_token" not in row


def test_the_trained_module_is_no_verifier_under_another_name(tmp_path):
    """It would lose its frozen parts, a LoRA's whole base: "policy" and "base" say which weights are meant."""
    peft = pytest.importorskip("peft")
    module = AutoModelForCausalLM.from_pretrained(fc.tiny.senior())
    tokenizer, lora = AutoTokenizer.from_pretrained(fc.tiny.senior()), peft.LoraConfig(r=2, target_modules=["q_proj"])
    args = trainer(tmp_path).args
    for peft_config in (None, lora):
        with pytest.raises(ValueError, match="verifier: got 'the module that is trained', need another module than"):
            models = {"policy": module, "verifier": module}
            Trainer("mintrl", models, ROWS, reward, args, peft_config, tokenizer, None, ())
    module = AutoModelForCausalLM.from_pretrained(fc.tiny.senior())
    t = Trainer("mintrl", {"policy": module, "verifier": "policy"}, ROWS, reward, args, lora, tokenizer, None, ())
    assert {n for n, p in t.policy.module.named_parameters() if p.requires_grad} == {
        n for n, _ in t.policy.module.named_parameters() if "lora" in n
    }


BAD = {
    "controls": (dict(num_controls=0), "num_controls: got 0, need in 1..6, num_generations"),
    "beta": (dict(beta=0.0), "beta: got 0.0, need > 0 for method 'mintrl'"),
    "anchor": (dict(anchor="both"), "anchor: got 'both', need const or proxy"),
    "kappa": (dict(kappa=0.5), "kappa: got 0.5, need None or <= 0, a log-prob"),
    "proxy kappa": (dict(kappa=-1.0, anchor="proxy"), "kappa: got -1.0, need None with anchor 'proxy'"),
    "loo": (dict(baseline="loo", num_controls=1), "num_controls: got 1, need >= 2 with baseline 'loo'"),
    "scale": (dict(scale_rewards="group"), "scale_rewards: got 'group', need none for method 'mintrl'"),
    "clip": (dict(delta=3.0), "epsilon_high, delta, importance_sampling_level: got .*, need none of them"),
    "loss": (dict(loss_type="dapo"), "loss_type: got 'dapo', need regression"),
    "band": (dict(external_share=(0.4, 0.2)), "external_share: got \\(0.4, 0.2\\), need None or two shares"),
    "phase": (dict(intervention_updates=3, num_iterations=2), "intervention_updates: got 3, need a multiple of 2"),
    "floor": (dict(logprob_floor=1.0), "logprob_floor: got 1.0, need < 0"),
    "chunk": (dict(chunk=0), "chunk: got 0, need >= 1"),
    "truncated law": (dict(top_k=3), "top_k, top_p, min_p: got .*, need 0, 1, 0"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_settings_are_one_sentence(tmp_path, fault):
    changes, message = BAD[fault]
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **changes)


def test_pmd_mean_has_no_phase_to_check():
    assert not fc.MInTRLConfig(num_generations=8, num_controls=8, num_iterations=3).intervenes


def test_without_answers_leaks_are_told_to_be_unseen(tmp_path):
    args = dataclasses.replace(trainer(tmp_path).args, leaks=None)
    models = {"policy": fc.tiny.senior(), "verifier": FunctionVerifier(review, correct)}
    with pytest.warns(UserWarning, match="leaks: got None and columns \\['prompt'\\], need a column 'answer'"):
        Trainer("mintrl", models, [{"prompt": "add 12 + 30 :"}] * 3, reward, args, None, None, None, ())


def test_roles_are_checked(tmp_path):
    args = trainer(tmp_path).args
    for models in ({"policy": fc.tiny.senior()}, {"senior": fc.tiny.senior(), "verifier": None}):
        with pytest.raises(ValueError, match="models: got .*, need policy and verifier for method 'mintrl'"):
            Trainer("mintrl", models, ROWS, reward, args, None, None, None, ())
