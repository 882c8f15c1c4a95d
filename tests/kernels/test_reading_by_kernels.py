"""A whole recording with every kernel that CUDA tensors take, in the interpreter, against the same on a CPU."""

import pytest
import torch
from tiny_models import tiny_model

from sinkscope.kernels import token_statistics
from sinkscope.models.given_ids import given_batch
from sinkscope.models.loading import load
from sinkscope.tracing import hooks
from sinkscope.tracing.attention import _fused_attention
from sinkscope.tracing.observables import CHAIN
from sinkscope.tracing.recorder import record

OF_INTEREST = [o.name for o in CHAIN if "P" in o.axes or o.asks == "positions of interest"]
OF_TENSORS = [o.name for o in CHAIN if o.name not in ("lock", "positions_of_interest", "rank_tokens")]


def log_sum_exp_by_definition(query, key, value, rule):
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = (query @ key.mT * rule.scaling).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2), scores.logsumexp(-1)


@pytest.fixture
def by_kernels(monkeypatch):
    """Sends the recording of CPU tensors the way of CUDA's; only torch's fused attention is written out."""
    monkeypatch.setattr(token_statistics, "_has_kernel", lambda tensor: True)
    monkeypatch.setattr("sinkscope.tracing.attention._attention_and_log_sum_exp", log_sum_exp_by_definition)
    monkeypatch.setattr(hooks, "read_attention", lambda *inputs: (_fused_attention(*inputs), "kernels"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("keys", [None, [0, 10]])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_kernels_record_what_torch_records(keys, num_sequences, request):
    loaded = load(tiny_model("llama"))
    ids = torch.randint(3, 97, (num_sequences, 40), generator=torch.Generator().manual_seed(0))
    batch = given_batch(ids, model=loaded.model)
    expected = record(loaded, batch, CHAIN, keys=keys)
    request.getfixturevalue("by_kernels")
    found = record(loaded, batch, CHAIN, keys=keys)
    assert expected.attention_path.startswith("tiles")
    assert found.attention_path == "kernels"
    # Attention adds up in another order, so what follows it differs in the last bits of activations around 1; the
    # kurtosis takes their fourth powers.
    same = {"rtol": 2e-4, "atol": 1e-5, "check_dtype": False, "equal_nan": True}
    of_all_keys = [mine.tolist() for mine in found.rows("positions_of_interest")[:, 0]]
    if keys is None:  # with two keys the other positions received nothing: equal values, of which any may be named
        assert of_all_keys == [theirs.tolist() for theirs in expected.rows("positions_of_interest")[:, 0]]
    for name in OF_TENSORS:
        if name in expected and (keys is None or name not in OF_INTEREST):
            torch.testing.assert_close(found[name], expected[name], msg=lambda text, n=name: f"{n}: {text}", **same)
    # Control: positions of interest must differ between layers, or the wrong layer's would have passed.
    assert len({tuple(row) for row in of_all_keys}) > 1
