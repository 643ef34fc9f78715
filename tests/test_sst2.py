"""MiniLM in two parts is the encoder, and a small version of the experiment on SST-2 runs."""

import json

import pytest
import torch
from torch import nn

from experiments import adaptation, common, sst2
from experiments.__main__ import main
from experiments.pretrained import minilm, word_pieces
from experiments.pretrained import sst2 as sentences


def needs(*names):
    missing = [name for name in names if not (common.DATA / name).exists()]
    if missing:
        pytest.skip(f"no {missing[0]} under {common.DATA}")


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


def test_sst2_runs(tmp_path):
    needs("sst2/train.tsv", "weights/minilm_l6_h384_fp16.safetensors")
    where = main(["sst2", "--quick", "--out", str(tmp_path)])
    table = json.loads((where / "metrics.json").read_text())["results"]["SST-2"]["20"]
    assert list(table) == list(adaptation.METHODS)
    assert all(0 <= one["ece"]["mean"] <= 1 for one in table.values())
    assert (where / "figure.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="has 6 layers; got --layers 7"):
        main(["sst2", "--quick", "--layers", "7"])
