"""Transcripts: a rollout by author and intervention, in completions.jsonl, on the console and back."""

from __future__ import annotations

import json

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoTokenizer

import fastcollab as fc
from fastcollab import tiny
from fastcollab.callbacks import Callbacks
from fastcollab.progress import Progress, coloured, summary
from fastcollab.run_log import RunLog
from fastcollab.transcript import Piece, entry, pieces, transcript
from fastcollab.types import Intervention, Review, Rollout

TOKENIZER = AutoTokenizer.from_pretrained(tiny.senior())


def ids(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def corrected(**changes) -> Rollout:
    """ "add 1 + 2 :" answered with two interventions, the second right behind what the first inserted."""
    parts = [(0, " answer"), (1, " 3 +"), (1, " 4"), (0, " 5<eos>")]
    written = [ids(text) for _, text in parts]
    author = [a for (a, _), part in zip(parts, written, strict=True) for _ in part]
    cuts = [len(written[0]), len(written[0] + written[1])]
    log = [Intervention(at, tuple(ids(text)), tuple(part))
           for at, text, part in zip(cuts, (" 9<eos>", " + +"), written[1:], strict=False)]  # fmt: skip
    whole = sum(written, [])
    settings = dict(interventions=log, text=TOKENIZER.decode(whole, skip_special_tokens=True)) | changes
    zero = np.zeros(len(whole), np.float32)
    return Rollout(ids("add 1 + 2 :"), whole, np.array(author, np.uint8), ("policy", "verifier"), zero, "eos",
                   **settings)  # fmt: skip


WANTED = [
    Piece(" answer", "policy", "", 1),
    Piece(" 9<eos>", "", "dropped", 2),
    Piece(" 3 +", "verifier", "inserted", 2),
    Piece(" + +", "", "dropped", 2),
    Piece(" 4", "verifier", "inserted", 1),
    Piece(" 5<eos>", "policy", "", 2),
]


def test_pieces_are_in_the_order_of_the_rollout():
    assert transcript(corrected(), TOKENIZER) == WANTED
    response = "".join(p.text for p in WANTED if p.kind != "dropped")
    assert response == TOKENIZER.decode(corrected().ids)


def test_a_correction_that_opens_the_response_stands_first():
    """Spec 6.5: the whole draft was dropped."""
    r = Rollout([1], ids(" 3"), np.ones(1, np.uint8), ("policy", "verifier"), np.zeros(1, np.float32), "length",
                interventions=[Intervention(0, tuple(ids(" 9")), tuple(ids(" 3")))])  # fmt: skip
    assert transcript(r, TOKENIZER) == [Piece(" 9", "", "dropped", 1), Piece(" 3", "verifier", "inserted", 1)]


def test_nothing_written_is_no_piece():
    r = Rollout([], [], np.zeros(0, np.uint8), ("policy",), np.zeros(0, np.float32), "length")
    assert transcript(r, TOKENIZER) == [] and entry(r, TOKENIZER) == {"authors": []}


class Bytes:
    """A tokenizer whose ids are bytes, so that a character spans several."""

    def decode(self, ids, **kwargs):
        return bytes(ids).decode("utf-8", "replace")


def test_a_character_of_several_tokens_is_whole():
    text = "né→".encode()
    r = Rollout([65], list(text), np.zeros(len(text), np.uint8), ("policy",), np.zeros(len(text), np.float32), "eos")
    assert transcript(r, Bytes()) == [Piece("né→", "policy", "", 6)]


def test_completions_hold_authors_interventions_and_reviews(tmp_path):
    reviews = [Review(3, "intervention"), Review(5, "intervention"), Review(6, "keep")]
    plain = Rollout([1], ids(" 3"), np.zeros(1, np.uint8), ("policy",), np.zeros(1, np.float32), "eos", text="3")
    made = [corrected(reviews=reviews), plain]
    args = fc.GRPOConfig(output_dir=str(tmp_path), disable_tqdm=True)
    (tmp_path / "completions.jsonl").write_text('{"step": 7, "completion": "of a run that is overwritten"}\n')
    with RunLog(args, Callbacks([], args, None, None, None, None), 3, resume=False) as log:
        for step in (1, 2):
            log.completions(made, TOKENIZER, 0, [{"step": step, "prompt": "p", "reward": r} for r in (1.0, None)])
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert lines[:2] == [
        {
            "completion": made[0].text,
            "authors": [["policy", " answer", 1], ["verifier", " 3 +", 2], ["verifier", " 4", 1],
                        ["policy", " 5<eos>", 2]],
            "interventions": [
                {"position": 1, "dropped": " 9<eos>", "dropped_tokens": 2, "inserted": " 3 +"},
                {"position": 3, "dropped": " + +", "dropped_tokens": 2, "inserted": " 4"},
            ],
            "reviews": [[3, "intervention"], [5, "intervention"], [6, "keep"]],
            "step": 1, "prompt": "p", "reward": 1.0,
        },
        {"completion": "3", "authors": [["policy", " 3", 1]], "step": 1, "prompt": "p", "reward": None},
    ]  # fmt: skip
    assert pieces(lines[0]) == WANTED
    log.rewind(1)
    assert [json.loads(x) for x in (tmp_path / "completions.jsonl").read_text().splitlines()] == lines[:2]


# -- the console


def printed(terminal: bool) -> str:
    progress = Progress(1)
    progress.console = Console(force_terminal=terminal, color_system="standard" if terminal else None, width=200)
    with progress.console.capture() as captured:
        progress.completions([corrected()], TOKENIZER)
    return captured.get()


def test_a_terminal_shows_dropped_text_struck_through():
    spans = [(span.style, coloured(corrected(), TOKENIZER).plain[span.start : span.end])
             for span in coloured(corrected(), TOKENIZER).spans]  # fmt: skip
    assert spans == [("cyan", " answer"), ("strike bright_black", " 9<eos>"), ("magenta", " 3 +"),
                     ("strike bright_black", " + +"), ("magenta", " 4"), ("cyan", " 5<eos>")]  # fmt: skip
    assert "\x1b[9;90m 9<eos>\x1b[0m" in printed(terminal=True)


def test_rollouts_with_interventions_are_printed_first(tmp_path, capsys):
    plain = Rollout([1], ids(" 3"), np.zeros(1, np.uint8), ("policy",), np.zeros(1, np.float32), "eos", text="3")
    args = fc.GRPOConfig(output_dir=str(tmp_path))
    log = RunLog(args, Callbacks([], args, None, None, None, None), 3, resume=False)
    log.completions([plain, corrected()], TOKENIZER, 1, [{"step": 1}, {"step": 1}])
    assert capsys.readouterr().out.startswith(" answer[- 9")
    assert "3" == json.loads((tmp_path / "completions.jsonl").read_text().splitlines()[0])["completion"]


def test_where_there_are_no_styles_marks_say_it():
    assert printed(terminal=False) == " answer[- 9<eos>-]{+ 3 ++}[- + +-]{+ 4+} 5<eos>\n"


@pytest.mark.parametrize(("row", "said"), [
    ({"reward": 0.5, "mintrl/external_share_micro": 0.0312}, "reward 0.500  external 0.031"),
    ({"reward": 0.5, "mintrl/external_share_micro": None}, "reward 0.500"),
    ({"reward": 0.5, "tandem/senior_token_frac": 0.5}, "reward 0.500  senior 0.50"),
])  # fmt: skip
def test_the_progress_line_has_the_external_share_where_there_is_one(row, said):
    assert summary(row) == said
