"""MiniLM in two parts is the encoder, and a small version of the experiment on SST-2 runs."""

import pytest
import torch
from torch import nn

from experiments import common
from experiments.__main__ import main
from experiments.common.data import sst2 as sentences
from experiments.common.data import word_pieces
from experiments.common.networks import minilm
from experiments.mu2020 import contest, gains, sst2
from experiments.mu2020.contest import GRADIENTS, LINEAR
from tests.support.needed import needs
from tests.support.quick_runs import run_quick


def test_the_parts_of_minilm_are_the_encoder():
    needs("weights/minilm_l6_h384_fp16.safetensors", "weights/minilm_vocab.txt")
    folder = common.DATA / "weights"
    net = minilm(folder)
    ids, mask = word_pieces(folder, ["a stirring , funny film", "no"])
    assert ids.tolist()[1][:3] == [101, 2053, 102] and mask.sum(1).tolist() == [7, 3]
    with torch.no_grad():
        out = net(input_ids=ids, attention_mask=mask).last_hidden_state
        mean = torch.stack([out[0].mean(0), out[1, :3].mean(0)])
        h = sst2.below(net, 2, ids, mask)
        torch.testing.assert_close(sst2.Top(net.encoder.layer[-2:], nn.Identity())(h, mask), mean, rtol=1e-4, atol=1e-5)
        whole = sst2.with_head(net, nn.Identity())
        torch.testing.assert_close(whole(ids, mask), mean, rtol=1e-4, atol=1e-5)


def test_sentences_have_their_labels():
    needs("sst2/dev.tsv")
    texts, y = sentences(common.DATA, "dev")
    assert len(texts) == len(y) == 872 and texts[0] == "one long string of cliches" and int(y[0]) == 0


@pytest.mark.slow
def test_sst2_runs(tmp_path):
    needs("sst2/train.tsv", "weights/minilm_l6_h384_fp16.safetensors")
    table = run_quick(tmp_path, "sst2", "--test", "10")["results"]["SST-2"]["20"]
    assert list(table) == list(contest.METHODS)
    assert all(0 <= one["ece"]["mean"] <= 1 for one in table.values())
    with pytest.raises(ValueError, match="has 6 layers; got --layers 7"):
        main(["sst2", "--quick", "--layers", "7"])
    with pytest.raises(ValueError, match="has 1,821 test sentences; got --test 2000"):
        main(["sst2", "--quick", "--test", "2000"])


def test_runs_are_put_beside_earlier_ones(tmp_path, monkeypatch):
    needs("sst2/train.tsv", "weights/minilm_l6_h384_fp16.safetensors")

    def scored(contest, limits, whole):
        """Accuracies that tell the draw and the number of labels; which sentences they would be learned from."""
        learned.append((contest.seed, whole.train.X[0][:, 1:4].tolist()))
        scores = dict.fromkeys((*gains.SCORES, *gains.TIMES), 0.5)
        gain = 0.1 * (1 + contest.seed) + len(contest.train) / 1000
        return {LINEAR: scores, GRADIENTS: {**scores, "accuracy": 0.5 + gain}}

    def run(*words):
        return run_quick(tmp_path, "sst2", "--test", "6", *words)

    learned = []
    monkeypatch.setattr(contest.Contest, "all", scored)
    run("--sizes", "4")
    run("--sizes", "8", "--seed", "1", "--seeds", "1")
    record = run("--sizes", "4", "--seed", "1", "--seeds", "1")
    (where,), key = record["parts"], "SST-2, draw {}, {} labels"
    assert where == "MiniLM-L6, 1 layer adapts, 6 test sentences"
    runs = record["parts"][where]["runs"]
    assert runs.keys() == {key.format(0, 4), key.format(1, 4), key.format(1, 8)}
    assert runs[key.format(1, 8)]["fine-tuning"]["patience"] == sst2.SEARCH["quick"].patience
    gain = record["less the linear one"]["accuracy"]
    assert gain["4"][GRADIENTS]["mean"] == pytest.approx(0.154) and gain["4"][GRADIENTS]["count"] == 2
    assert gain["8"][GRADIENTS]["mean"] == pytest.approx(0.208) and gain["8"][GRADIENTS]["low"] is None
    # A process of its own for each size draws the same labels: the fewer are the first of the more.
    (_, first), (_, more), (_, fewer) = learned
    assert more[:4] == fewer != first
    page = (tmp_path / "README.md").read_text()
    assert "+15.4" in page and "paired over 2 draws with 6 test" in page and "paired over 1 draws with 6 test" in page
    # Without a number nothing is measured.
    again = run("--sizes")
    assert len(learned) == 3
    assert all(again[name] == record[name] for name in ("parts", "results", "less the linear one", "settings"))
    with pytest.raises(ValueError, match="No runs are kept of 'MiniLM-L6, 2 layers adapt, 6 test sentences'"):
        run("--sizes", "--layers", "2")


def test_all_labels_are_no_draws_of_labels():
    how = {"test sentences of a draw": 6}
    runs = [{"seed": seed, "labels": sst2.LABELS, "machine": "some"} for seed in range(3)]
    text = "paired over 3 draws with 6 test sentences, 95 % interval"
    same = "; all labels there are, so that draws differ in their order alone"
    assert sst2.differs(how, runs, {}) == f"{text}{same}; some"
    assert sst2.differs(how, runs, {"over test examples": True}) == f"{text} over the sentences{same}; some"
    assert sst2.differs(how, [{**one, "labels": 50} for one in runs], {}) == f"{text}; some"
