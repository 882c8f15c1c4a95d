"""sinkscope remedy, as a user types it."""

import json

import torch
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM


def test_a_rotated_model_is_written_with_its_card(sinkscope, tmp_path):
    model = tiny_model("llama", num_hidden_layers=1)
    model.save_pretrained(tmp_path / "tiny")
    texts = ("--length", 64, "--num-sequences", 2)
    result = sinkscope("remedy", "tiny", "--rotate", *texts, "--json", "--out", "out")
    assert result.code == 0, result.err
    measured = [row["model"] for row in json.loads(result.out)["losses"]]
    assert measured[::3] == ["baseline", "rotate", "norm gains folded in, the basis as it was"]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "norm gains folded in" in card
    assert "on 2 held-out texts of 64 tokens, written by the model itself." in card
    ids = torch.arange(8)[None]
    with torch.no_grad():
        rotated = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert torch.allclose(rotated(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(rotated.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert sinkscope("remedy", "tiny", "--rotate", *texts, "--out", "tiny", "--overwrite").code == 2  # not ours
