"""Label providers on ballots made by hand, with labels worked out by hand."""

from __future__ import annotations

import itertools
import random

import pytest
from test_ballots import ballot

from fastcollab.ballots import TIES
from fastcollab.labels import RandomLabel, SelfVote, ShuffledUid, Weighted, make_labels

VOTE = {"tie": "abstain", "min_votes": 2}
SAID = {  # question -> voter -> answers; "." is none. Votes: q a/b/c = x x y; r = x - z; s = y y y; t = - - -
    "q": {"a": "xxxy", "b": "xx..", "c": "yyyx"},
    "r": {"a": "xxx.", "b": "xxyy", "c": "zzz."},
    "s": {"a": "yyyy", "b": "yyx.", "c": "yy.."},
    "t": {"a": "xyz.", "b": "....", "c": "xxyy"},
}
UIDS = list(SAID)


def cast(names="abc", uids=UIDS, said=SAID):
    return {
        (v, u): ballot(said[u][v.partition("@")[0]], voter=v, uid=u, version=ord(v[0]), view="prompt")
        for u in uids
        for v in names
    }


def labels_of(name, names="abc", ballots=None, uids=UIDS, students=None, **options):
    provider = make_labels(name, VOTE, **options)
    return provider(3, uids, list(students or names), ballots or cast(names))


def keys_of(labels, students="abc", uids=UIDS):
    return {s: "".join(labels[s, u].key or "." for u in uids) for s in students}


HARD = [
    ("self", "abc", {"a": "xxy.", "b": "x.y.", "c": "yzy."}),
    ("pair", "ab", {"a": "x.y.", "b": "xxy."}),
    ("ring", "abc", {"a": "x.y.", "b": "yzy.", "c": "xxy."}),  # a from b, b from c, c from a
    ("majority", "abc", {"a": "..y.", "b": "..y.", "c": "x.y."}),  # both peers, or none
    ("union", "abc", {"a": ".zy.", "b": "..y.", "c": "xxy."}),  # the key where the peers name one only
]


@pytest.mark.parametrize("name, names, want", HARD)
def test_hard_labels(name, names, want):
    labels = labels_of(name, names)
    assert keys_of(labels, names) == want
    for label in labels.values():
        assert name == "union" or label.scores == (None if label.key is None else {label.key: 1.0})


def test_union_pays_for_every_peers_answer():
    labels = labels_of("union")
    assert labels["a", "q"].scores == {"x": 1.0, "y": 1.0}  # b says x, c says y
    assert labels["b", "r"].scores == {"x": 1.0, "z": 1.0}
    assert labels["a", "t"].scores is None


def test_strict_majority_of_three_peers():
    said = {"q": {"a": "xx", "b": "xx", "c": "yy", "d": "zz"}, "r": {"a": "..", "b": "..", "c": "yy", "d": ".."}}
    labels = labels_of("majority", "abcd", cast("abcd", "qr", said), uids="qr")
    assert keys_of(labels, "abcd", "qr") == {"a": "..", "b": "..", "c": "x.", "d": "x."}  # a quorum of two, no tie


def test_soft_labels_are_the_teachers_shares():
    labels = labels_of("soft", "ab")
    assert labels["b", "q"].scores == {"x": 3 / 4, "y": 1 / 4}
    assert labels["a", "q"].scores == {"x": 2 / 4}  # of all votes
    assert labels["a", "t"].scores is None  # b said nothing
    assert labels["a", "q"].reward("y") == 0.0 and labels["a", "q"].reward(None) == 0.0


TAUGHT = [("pair", "ab", {}), *((name, "abc", {}) for name in ("ring", "majority", "union", "soft"))]
TAUGHT += [("weighted", "abc", {"guard": guard}) for guard in (None, "cap", "agreement")]


def heard(name, names, options, tie, voter, students):
    """Students whose labels one voter's answers can change, by trying many."""
    provider = make_labels(name, {"tie": tie, "min_votes": 1}, **options)
    rng, changed = random.Random(0), set()
    for _ in range(60):
        said = {v: rng.choices("xyz.", rng.choice([[5, 3, 1, 2], [3, 5, 1, 2]]), k=8) for v in names}
        labels = []
        for answers in (said[voter], *(list(8 * k) for k in "wxy."), list("yyyyxxxx")):
            logprobs = [-0.1 * k for k in range(8)]
            ballots = {(v, "q"): ballot(k, logprobs, voter=v) for v, k in (said | {voter: answers}).items()}
            labels.append(provider(3, ["q"], students, ballots))
        changed |= {s for s in students for other in labels if other[s, "q"] != labels[0][s, "q"]}
    return changed


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("name, names, options", TAUGHT)
def test_a_student_is_taught_by_others_only(name, names, options, tie):
    """Whatever a student says about a question, its own labels stay, and another's do not."""
    changed = heard(name, names, options, tie, "a", list(names))
    assert "a" not in changed and changed


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize(
    "name, voters, students",
    [("self", "a b", "a b"), ("ema", "a a@ema b b@ema", "a b"), ("views", "a a@v b b@v", "a a@v b b@v")],
)
def test_a_baseline_hears_no_other_model(name, voters, students, tie):
    voters, students = voters.split(), students.split()
    for voter in (v for v in voters if v[0] == "b"):
        changed = heard(name, voters, {}, tie, voter, students)
        assert all(s[0] == "b" for s in changed)


def test_the_cap_is_that_of_the_peers():
    """s of b, c: 2/8, 4/8, cap 0.475: S(x) = 2/8 * 2/8 + 0.475 * 3/8 > S(y) = 0.475 * 4/8, whatever a says."""
    for own in ("wwwwwwww", "........"):
        said = {"a": own, "b": "xx......", "c": "xxxyyyy."}
        assert Weighted(VOTE).label("a", {v: ballot(keys, voter=v) for v, keys in said.items()}).key == "x"


def test_agreement_needs_two_peers():
    """A lone peer agrees with nobody, and its weight would be 0 for ever."""
    with pytest.raises(ValueError, match="models of Weighted: got 2, need >= 3"):
        make_labels("weighted", VOTE, guard="agreement").voters("ab")
    assert make_labels("weighted", VOTE, guard="agreement", include_self=True).voters("ab") == ["a", "b"]


def test_labels_name_their_teachers_and_versions():
    assert labels_of("ring")["a", "q"].teachers == (("b", ord("b")),)
    assert labels_of("union")["b", "q"].teachers == (("a", ord("a")), ("c", ord("c")))
    assert labels_of("self")["c", "t"].teachers == (("c", ord("c")),)  # also where there is no label


def test_ring_takes_another_order():
    labels = labels_of("ring", order=("c", "b", "a"))  # c from b, b from a, a from c
    assert keys_of(labels) == {"a": "yzy.", "b": "xxy.", "c": "x.y."}
    with pytest.raises(ValueError, match="order: got .*, need a permutation of"):
        labels_of("ring", order=("a", "b"))


def test_the_weighted_vote():
    """q: s = 3/4, 2/4, 3/4; a is taught by b and c: S(x) = .5*.5 + .75*.25, S(y) = .75*.75. With itself S(x) leads."""
    plain = {"guard": None}
    assert keys_of(labels_of("weighted", **plain))["a"] == "yzy."
    with_self = labels_of("weighted", include_self=True, **plain)
    # x: .75*.75 + .25 + .75*.25 = 1.0; y: .75*.25 + .75*.75 = .75
    assert {with_self[s, "q"].key for s in "abc"} == {"x"}
    assert labels_of("weighted", include_self=True, margin=0.24, **plain)["a", "q"].key == "x"
    assert labels_of("weighted", include_self=True, margin=0.26, **plain)["a", "q"].key is None
    # gamma 0: each voter counts its share: x 3/4 + 2/4 + 1/4, y 1/4 + 3/4
    assert labels_of("weighted", include_self=True, gamma=0.0, margin=0.49, **plain)["a", "q"].key == "x"
    assert labels_of("weighted", include_self=True, gamma=0.0, margin=0.51, **plain)["a", "q"].key is None


def test_guards_of_the_weighted_vote():
    """A collapsed voter (all 8 say 0) outweighs two that agree; the cap lowers its weight, agreement takes it away."""
    said = {"a": "00000000", "b": "5555....", "c": "5555...."}
    ballots = {v: ballot(keys, voter=v) for v, keys in said.items()}
    weights = {guard: Weighted(VOTE, guard=guard).weights(ballots) for guard in (None, "cap", "agreement")}
    assert weights[None] == {"a": 1.0, "b": 0.5, "c": 0.5}
    assert weights["cap"] == pytest.approx({"a": 0.9, "b": 0.5, "c": 0.5})  # the 90th percentile of 0.5, 0.5, 1
    assert weights["agreement"] == {"a": 0.0, "b": 0.125, "c": 0.125}  # 1/2 * 1/2, with one of two others
    won = {g: Weighted(VOTE, guard=g, include_self=True).label("a", ballots).key for g in weights}
    assert won == {None: "0", "cap": "0", "agreement": "5"}
    with pytest.raises(ValueError, match="guard: got 'none', need None, 'cap' or 'agreement'"):
        Weighted(VOTE, guard="none").label("a", ballots)


def test_a_weighted_tie_or_a_lone_vote_is_no_label():
    tied = {v: ballot(keys, voter=v) for v, keys in {"a": "....", "b": "xxy.", "c": "yyx."}.items()}
    assert Weighted(VOTE).label("a", tied).scores is None
    lone = {v: ballot(keys, voter=v) for v, keys in {"a": "xxxx", "b": "x...", "c": "...."}.items()}
    assert Weighted(VOTE).label("a", lone).scores is None
    assert Weighted({"min_votes": 1}).label("a", lone).key == "x"


def test_ema_and_views():
    ema = make_labels("ema", VOTE)
    voters = ema.voters(["b", "a"])
    assert voters == ["a", "a@ema", "b", "b@ema"]
    ballots = cast(voters)
    ballots["a@ema", "q"] = ballot("zz..", voter="a@ema", version=9)
    labels = ema(3, UIDS, ["a", "b"], ballots)
    assert keys_of(labels, "ab") == {"a": "zxy.", "b": "x.y."}
    assert labels["a", "q"].teachers == (("a@ema", 9),)
    views = make_labels("views", VOTE)
    students = ["a", "a@rephrased"]
    ballots = cast(students) | {("a@rephrased", "q"): ballot("zzy.", voter="a@rephrased", view="rephrased")}
    labels = views(3, UIDS, students, ballots)
    assert keys_of(labels, students) == {"a": "zxy.", "a@rephrased": "xxy."}
    with pytest.raises(ValueError, match="views of 'a': got 1, need 2"):
        views(3, UIDS, ["a", "b"], cast("ab"))


def test_gold():
    labels = labels_of("gold", answers=dict(zip(UIDS, "xyzx", strict=True)))
    assert keys_of(labels) == dict.fromkeys("abc", "xyzx")
    with pytest.raises(ValueError, match=r"answers: got .*\['s', 't'\].*, need the right one for every question"):
        labels_of("gold", answers={"q": "x", "r": "y"})


def test_random_labels_know_nothing_of_the_question():
    """The same ballots at other questions give the same labels; they vary with question, student, step and seed."""
    uids = [f"u{i}" for i in range(60)]
    rng = random.Random(0)
    said = {u: {v: [rng.choice("vwxyz") for _ in range(4)] for v in "ab"} for u in uids}
    labels = RandomLabel(1)(3, uids, ["a", "b"], cast("ab", uids, said))
    moved = dict(zip(uids, rng.sample([said[u] for u in uids], 60), strict=True))
    assert RandomLabel(1)(3, uids, ["a", "b"], cast("ab", uids, moved)) == labels
    drawn = {s: [labels[s, u].key for u in uids] for s in "ab"}
    assert set(drawn["a"]) == set("vwxyz") and drawn["a"] != drawn["b"]
    for other in (
        RandomLabel(2)(3, uids, ["a"], cast("ab", uids, said)),
        RandomLabel(1)(4, uids, ["a"], cast("ab", uids, said)),
    ):
        assert [other["a", u].key for u in uids] != drawn["a"]
    assert RandomLabel(1)(3, ["t"], ["b"], {("b", "t"): ballot("..")})["b", "t"].scores is None


def test_shuffled_uids_are_a_derangement():
    for n, seed in itertools.product((2, 3, 7), range(20)):
        uids = [f"u{i}" for i in range(n)]
        said = {u: {v: [u, u] for v in "ab"} for u in uids}
        labels = ShuffledUid(make_labels("pair", VOTE), seed)(5, uids, ["a", "b"], cast("ab", uids, said))
        got = [labels["a", u].key for u in uids]
        assert sorted(got) == uids and all(k != u for k, u in zip(got, uids, strict=True))
        assert got == [labels["b", u].key for u in uids]
    assert make_labels("shuffled", VOTE, inner="self").inner == SelfVote(VOTE)
    assert keys_of(labels_of("shuffled"), "abc") != keys_of(labels_of("ring"))  # of any number of models
    for uids in (["q"], ["q", "q"]):
        with pytest.raises(ValueError, match="questions of a step: got 1, need >= 2 to shuffle"):
            labels_of("shuffled", "ab", uids=uids)
    twice = labels_of("shuffled", "ab", uids=["q", "s", "q"])
    assert keys_of(twice, "ab", "qs") == {"a": "yx", "b": "yx"}


@pytest.mark.parametrize("name", ["self", "ring", "majority", "union", "soft", "weighted", "ema", "random", "shuffled"])
def test_neither_model_order_nor_question_order_nor_rollout_order_matters(name):
    rng = random.Random(0)
    options = {"inner": "ring"} if name == "shuffled" else {}
    provider = make_labels(name, VOTE | {"tie": "peer_assist"}, **options)
    voters = provider.voters(["a", "b", "c"])
    ballots = cast(voters)
    want = provider(3, UIDS, ["a", "b", "c"], ballots)
    assert len(set(map(str, want.values()))) > 1
    for _ in range(10):
        shuffled = {
            k: ballot(rng.sample(b.keys, 4), voter=k[0], uid=k[1], version=b.version)
            for k, b in rng.sample(list(ballots.items()), len(ballots))
        }
        got = provider(3, rng.sample(UIDS, 4), rng.sample(["a", "b", "c"], 3), shuffled)
        assert got == want


@pytest.mark.parametrize(
    "name, got, need",
    [("pair", 3, "2 .Ring takes more."), ("ring", 1, ">= 2"), ("majority", 2, ">= 3"), ("union", 1, ">= 2")],
)
def test_the_number_of_models_is_checked(name, got, need):
    kind = type(make_labels(name, VOTE)).__name__
    with pytest.raises(ValueError, match=f"models of {kind}: got {got}, need {need}"):
        make_labels(name, VOTE).voters("abc"[:got])


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="labels: got 'star', need pair, ring, "):
        make_labels("star", VOTE)
    for inner in ("views", "gold", "random", "shuffled"):
        with pytest.raises(ValueError, match=f"inner: got '{inner}', need pair, ring, majority, .* or ema"):
            make_labels("shuffled", VOTE, inner=inner)
    with pytest.raises(ValueError, match="answers: got None, need the right one by uid for labels 'gold'"):
        make_labels("gold", VOTE)


@pytest.mark.parametrize(
    "name, takes", [("ring", "order"), ("weighted", "gamma, margin, include_self, guard"), ("random", "none"),
                    ("shuffled", "none"), ("self", "none"), ("gold", "answers")],
)  # fmt: skip
@pytest.mark.parametrize("option", ["typo", "seed", "vote"])
def test_unknown_options_are_refused(name, takes, option):
    with pytest.raises(ValueError, match=rf"label_options: got \['{option}'\], need {takes} with labels"):
        make_labels(name, VOTE, 0, **({"inner": "self"} if name == "shuffled" else {}), **{option: 3})
