"""A whole reading with every kernel that CUDA tensors take, in the interpreter, against the same reading on a CPU."""

import pytest
import torch
from tiny_models import tiny_model

from sinkscope.capture import forward_reader
from sinkscope.capture.attention_readers import _fused_attention
from sinkscope.capture.reading import read_model
from sinkscope.kernels import standout, token_means, token_statistics
from sinkscope.models.loading import load
from sinkscope.models.token_batches import given_batch


def log_sum_exp_by_definition(query, key, value, rule):
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = (query @ key.mT * rule.scaling).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2), scores.logsumexp(-1)


@pytest.fixture
def by_kernels(monkeypatch):
    """Sends the reading of CPU tensors the way of CUDA's; only torch's fused attention is written out."""
    for module in (standout, token_means):
        monkeypatch.setattr(module, "_has_kernel", lambda tensor: True)
    for name in ("_torch_statistics", "_c_statistics"):
        monkeypatch.setattr(token_statistics, name, token_statistics._triton_statistics)
    monkeypatch.setattr("sinkscope.capture.attention_readers._attention_and_log_sum_exp", log_sum_exp_by_definition)
    monkeypatch.setattr(forward_reader, "read_attention", lambda *inputs: (_fused_attention(*inputs), "kernels"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("keys", [None, [0, 10]])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_kernels_read_what_torch_reads(keys, num_sequences, request):
    loaded = load(tiny_model("llama"))
    ids = torch.randint(3, 97, (num_sequences, 40), generator=torch.Generator().manual_seed(0))
    batch = given_batch(ids, model=loaded.model)
    expected = read_model(loaded, batch, keys=keys, effective_rank=False)
    request.getfixturevalue("by_kernels")
    found = read_model(loaded, batch, keys=keys, effective_rank=False)
    assert expected.attention_path.startswith("tiles")
    assert found.attention_path == "kernels"
    # Attention adds up in another order, so what follows it differs in the last bits of activations around 1; the
    # kurtosis takes their fourth powers.
    same = {"rtol": 2e-4, "atol": 1e-5}
    for name, values in expected.by_position.items():
        torch.testing.assert_close(
            found.by_position[name], values, msg=lambda text, name=name: f"{name}: {text}", **same
        )
    torch.testing.assert_close(found.received, expected.received, **same)
    torch.testing.assert_close(found.by_distance, expected.by_distance, **same)
    for mine, theirs in zip(found.residual, expected.residual, strict=True):
        if keys is None:  # with two keys the other positions received nothing: equal values, of which any may be named
            assert mine.candidates.tolist() == theirs.candidates.tolist()
            for name, values in theirs.sums.items():
                torch.testing.assert_close(mine.sums[name], values, check_dtype=False, **same)
        assert mine.candidates[8:10].tolist() == theirs.candidates[8:10].tolist()
    # Control: positions that stand out must differ between layers, or the wrong layer's would have passed.
    assert len({tuple(row.candidates.tolist()) for row in expected.residual}) > 1
