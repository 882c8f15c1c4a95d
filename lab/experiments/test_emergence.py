"""What early checkpoints tell: correlations by their formula, chance by shuffling, strengths by their definition."""

import json
import shutil

import emergence
import numpy as np
import pytest
import torch
from emergence import correlation_with_chance, standing_with_chance, unit_strengths
from tiny_models import tiny_model

from sinkscope.errors import InputError
from sinkscope.models.loading import load
from sinkscope.models.token_batches import token_batch
from sinkscope.statistics import average_ranks


def test_equal_values_share_their_ranks():
    assert average_ranks([10, 30, 20, 30, 30]).tolist() == [0, 3, 1, 3, 3]
    assert average_ranks([2.0, 2.0]).tolist() == [0.5, 0.5]


def test_the_correlation_is_spearmans():
    generator = np.random.default_rng(0)
    early, final = generator.normal(size=(2, 3, 40))
    final[:2] += early[:2]
    differences = [np.argsort(np.argsort(a)) - np.argsort(np.argsort(b)) for a, b in zip(early, final, strict=True)]
    expected = np.mean([1 - 6 * (d**2).sum() / (40 * (40**2 - 1)) for d in differences])
    found = correlation_with_chance(early, final)
    assert found["correlation"] == pytest.approx(expected)
    # Under chance the mean over 3 layers of 40 units has a standard deviation of 1 / sqrt(3 * 39).
    assert found["correlation_chance"] == pytest.approx(1.96 / np.sqrt(3 * 39), rel=0.1)
    assert found["correlation_p"] < 0.01
    assert correlation_with_chance(early, early)["correlation"] == pytest.approx(1)


def test_chance_is_chance():
    generator = np.random.default_rng(1)
    p_values = [correlation_with_chance(*generator.normal(size=(2, 2, 30)))["correlation_p"] for _ in range(40)]
    assert 0.3 < np.mean(p_values) < 0.7
    assert np.mean(np.array(p_values) < 0.05) < 0.2


def test_where_the_targets_stand():
    early = np.array([[1.0, 2.0, 3.0, 4.0, 5.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    assert standing_with_chance(early, [(0, 4), (1, 0)])["standing"] == 1
    found = standing_with_chance(early, [(0, 0), (1, 2)])
    assert found["standing"] == 0.25
    assert found["standing_p"] > 0.5
    many = np.arange(200.0)[None].repeat(3, 0)
    assert standing_with_chance(many, [(0, 199), (1, 198), (2, 199)])["standing_p"] < 0.01


def test_strengths_are_their_definition():
    loaded = load(tiny_model("llama"))
    batch = token_batch(loaded, "random", length=24, num_sequences=3)
    found_LFT = unit_strengths(loaded, batch)
    for index, layer in enumerate(loaded.model.model.layers):
        kept = []
        handle = layer.mlp.register_forward_pre_hook(lambda module, args, kept=kept: kept.append(args[0]))
        with torch.no_grad():
            loaded.model(batch.ids)
            x = kept[0]
            neurons = torch.nn.functional.silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x)
        handle.remove()
        down = layer.mlp.down_proj.weight.detach().double()
        for unit in (0, 33):
            norm = float((down[:, unit] ** 2).sum() ** 0.5)
            for position in (0, 23):
                expected = np.mean([abs(float(neurons[text, position, unit])) * norm for text in range(3)])
                assert found_LFT[index, unit, position] == pytest.approx(expected, rel=1e-5)
    checkpoint = emergence.Checkpoint(found_LFT, {}, findings=None)
    contrast = checkpoint.units_at(5, "contrast")[1, 7]
    others = [found_LFT[1, 7, t] for t in range(24) if t != 5]
    assert contrast == pytest.approx(found_LFT[1, 7, 5] / np.mean(others))


def test_a_snapshot_that_is_the_model_tells_all_and_another_seed_nothing(tmp_path, monkeypatch):
    run = tmp_path / "run"
    tiny_model("llama").save_pretrained(run / "model")
    tiny_model("llama", seed=5).save_pretrained(run / "snapshots/step-00000000")
    shutil.copytree(run / "model", run / "snapshots/step-00000100")
    result = emergence.emergence(run, length=32, num_sequences=4)
    at_sink = {(row["step"], row["quantity"]): row for row in result["units"] if row["at"] == "sink"}
    assert at_sink[100, "strength"]["correlation"] == pytest.approx(1)
    assert at_sink[100, "strength"]["correlation_p"] < 0.01
    assert at_sink[0, "contrast"]["correlation_p"] > 0.01, "the control"
    assert result["targets_are"].startswith("the strongest writer of each layer")
    assert at_sink[100, "strength"]["standing"] == 1
    assert {row["num_positions"] for row in result["positions"]} == {16}
    assert "| 100 | sink | strength | 1.000 |" in emergence.table(result)
    arguments = ["emergence", str(run), "--length", "32", "--num-sequences", "4", "--out", str(tmp_path / "out.json")]
    monkeypatch.setattr("sys.argv", arguments)
    emergence.main()
    assert json.loads((tmp_path / "out.json").read_text()) == result
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out.json"}


def test_a_run_without_snapshots_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"0 snapshots and no finished model\. Train with sinkscope pretrain --keep"):
        emergence.emergence(tmp_path, length=32, num_sequences=4)
