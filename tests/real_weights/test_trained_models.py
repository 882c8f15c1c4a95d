"""Facts about trained models that must hold in any right instrument."""

import json
import subprocess
import sys

import pytest
import torch

from sinkscope import load, token_batch, trace

pytestmark = pytest.mark.real_weights


def eager_received(loaded, ids):
    """[L, H, T] attention received from the model's own attention maps."""
    loaded.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            maps = loaded.model(ids, output_attentions=True, use_cache=False, logits_to_keep=1).attentions
    finally:
        loaded.model.set_attn_implementation("sdpa")
    num_queries = torch.arange(ids.shape[1], 0, -1)
    return torch.stack([layer.sum(-2).div(num_queries).mean(0) for layer in maps])


def test_smollm2_has_a_sink_that_few_neurons_write(smollm2_model):
    result = trace(smollm2_model, token_batch(smollm2_model))
    findings = result.findings
    assert findings.sinks[0].position == 0
    assert findings.sinks[0].low > 0.5
    assert findings.appears_in
    strongest = findings.massive_dimensions[0]
    birth = max(findings.appears_in, key=lambda layer: result.recording["dom_ratio"][layer, 0])
    writers = [neuron for neuron in findings.super_neurons if neuron.layer == birth and neuron.role == "writes"]
    assert sum(neuron.write_share for neuron in writers) > 0.5
    assert writers[0].dimension == strongest
    assert float(writers[0].sparsity.top_share) > 5 * writers[0].layer_top_share
    assert result.story.startswith("Position 0 ")
    assert f"appearing in layers {findings.appears_in[0]} " in result.story
    (sink, *_) = result.summary["sinks"]
    assert sink["rate_without_writers"]["high"] < sink["rate_without_random"]["low"]


def test_a_control_without_its_super_neurons_loses_the_dimension(smollm2_model):
    """The same instrument must see nothing where the found writers are taken out."""
    batch = token_batch(smollm2_model, num_sequences=4)
    neurons = [
        u for u in trace(smollm2_model, batch, effective_rank=False).findings.super_neurons if u.role == "writes"
    ]
    layers = smollm2_model.model.model.layers
    saved = {u.layer: layers[u.layer].mlp.down_proj.weight.detach().clone() for u in neurons}
    try:
        with torch.no_grad():
            for neuron in neurons:
                layers[neuron.layer].mlp.down_proj.weight[:, neuron.neuron] = 0
        without = trace(smollm2_model, batch, effective_rank=False)
    finally:
        with torch.no_grad():
            for layer, weight in saved.items():
                layers[layer].mlp.down_proj.weight.copy_(weight)
    intact = trace(smollm2_model, batch, effective_rank=False)
    assert without.recording["dom_ratio"][:, 0].max() < 0.5 * intact.recording["dom_ratio"][:, 0].max()


@pytest.mark.parametrize("name", ["gemma3_model", "stories15m_model"])
def test_these_need_bos_for_their_sink(name, request):
    loaded = request.getfixturevalue(name)
    without = trace(loaded, token_batch(loaded, num_sequences=16), effective_rank=False)
    assert without.findings.sinks == []
    assert without.story.startswith("No sink")
    with_bos = trace(loaded, token_batch(loaded, num_sequences=16, bos=True), effective_rank=False)
    assert with_bos.findings.sinks[0].position == 0
    assert with_bos.findings.variance_ratio is None  # BOS has no variance across sequences


def test_stories15m_tells_a_story(stories15m_model):
    """Its weights are where they belong: after BOS comes "Once upon a time", as every story of its training begins."""
    ids = torch.tensor([[1]])
    with torch.no_grad():
        for _ in range(4):
            next_id = stories15m_model.model(ids, use_cache=False).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, next_id], dim=1)
    assert ids.tolist() == [[1, 9038, 2501, 263, 931]]


@pytest.mark.parametrize("name", ["smollm2_model", "gemma3_model", "stories15m_model"])
def test_fast_path_equals_eager(name, request):
    loaded = request.getfixturevalue(name)
    batch = token_batch(loaded, num_sequences=2, bos=True)
    reading = trace(loaded, batch, effective_rank=False).recording
    expected = eager_received(loaded, batch.ids)
    torch.testing.assert_close(reading["received"], expected, atol=1e-4, rtol=0)
    # The control: another batch's maps are not within the tolerance.
    other = eager_received(loaded, token_batch(loaded, num_sequences=2, bos=True, seed=1).ids)
    assert (reading["received"] - other).abs().max() > 1e-3


def test_command_on_a_gguf_file(smollm2, tmp_path):
    command = [
        sys.executable,
        "-m",
        "sinkscope",
        "trace",
        str(smollm2),
        "--num-sequences",
        "4",
        "--json",
        "--out",
        str(tmp_path / "run"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["family"] == "llama"
    assert summary["sinks"][0]["position"] == 0
    assert (tmp_path / "run" / "chain.png").stat().st_size > 10_000


RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
"""Amino acids, in the order of their ids, which begin at 5."""
HEAVY = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYY"
    "ADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAKDRGYFDYWGQGTLVTVSS"
)
CHAIN_AND_SPECIES = (31, 26)
"""[HEAVY] and [HUMAN], with which these models were trained to begin."""


@pytest.mark.parametrize("name", ["IgLM", "IgLM-S"])
def test_a_trained_gpt2_without_a_sink_is_told_from_the_same_with_one(iglm, name):
    """On random ids neither model has a sink, as their own attention says too. On an antibody behind its tags both have
    a weak one on the first of them: what is no sink in the one reading must not be one in the other."""
    loaded = load(iglm / name, device="cpu")
    batch = token_batch(loaded)
    antibody = torch.tensor([[*CHAIN_AND_SPECIES, *(5 + RESIDUES.index(letter) for letter in HEAVY)]])
    for ids, position in ((batch.ids, None), (antibody, 0)):
        result = trace(loaded, ids)
        assert [sink.position for sink in result.findings.sinks] == ([] if position is None else [position])
        received = torch.as_tensor(result.recording["received"])
        torch.testing.assert_close(received, eager_received(loaded, ids), rtol=1e-3, atol=1e-5)
        rate = result.findings.strongest[1]
        assert rate < 0.02 if position is None else rate > 0.1
