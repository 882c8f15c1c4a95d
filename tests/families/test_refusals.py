"""What cannot be honoured is refused with words that help, never ignored; and a refusal leaves the model as it was."""

import pytest
import torch
from tiny_models import CONFIGURATIONS, tiny_model
from transformers import BloomConfig, BloomForCausalLM, GPTJConfig, GPTJForCausalLM

from sinkscope.errors import InputError
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.given_ids import given_batch
from sinkscope.tracing import attention_hook as hook_module
from sinkscope.tracing.attention_hook import attention_hook
from sinkscope.tracing.attention_rule import ReadingRequest
from sinkscope.tracing.tiles import tiled_attention
from sinkscope.tracing.trace import trace

T = 24


def tokens(length: int = T, num_sequences: int = 2) -> torch.Tensor:
    return torch.randint(3, 97, (num_sequences, length), generator=torch.Generator().manual_seed(0))


def refusal(call, *words: str) -> InputError:
    """The refusal that the call meets; it must be in whole sentences and hold the words."""
    with pytest.raises(InputError) as caught:
        call()
    error = caught.value
    assert str(error).endswith(".")
    for word in words:
        assert word in str(error)
    return error


def run_tapped(model, **inputs):
    """The decoder inside the hook, attention computed as it stands."""

    def attend(layer, query, key, value, rule):
        return tiled_attention(query, key, value, rule, ReadingRequest()).output

    with torch.no_grad(), attention_hook(anatomy_of(model), attend):
        return model.get_decoder()(input_ids=tokens(), use_cache=False, **inputs)


def padded_mask() -> torch.Tensor:
    mask = torch.ones(2, T, dtype=torch.long)
    mask[1, :3] = 0
    return mask


# Padding and masks


def test_padding_is_not_read():
    batch = given_batch({"input_ids": tokens(), "attention_mask": padded_mask()})
    assert [len(row) for row in batch.whole] == [T, T - 3]
    assert torch.equal(batch.whole[1], tokens()[1, 3:])
    # Control: a mask of ones hides nothing.
    assert given_batch(tokens(), torch.ones(2, T)).length == T


@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_a_padding_mask_at_the_model_is_refused(family):
    model = tiny_model(family)
    before = model.config._attn_implementation
    refusal(lambda: run_tapped(model, attention_mask=padded_mask()), "padding")
    assert model.config._attn_implementation == before
    assert not hook_module._hooks
    # Control: without the mask, and with a mask of ones, the same call goes through.
    plain = run_tapped(model).last_hidden_state
    if family != "falcon":
        assert torch.equal(run_tapped(model, attention_mask=torch.ones(2, T)).last_hidden_state, plain)


def test_a_mask_tensor_made_elsewhere_is_refused():
    """transformers passes a mask of four dimensions on as it is, past the function that reads what a mask means."""
    everything = torch.zeros(2, 1, T, T)
    with pytest.raises(RuntimeError, match="layer 0 got a mask"):
        run_tapped(tiny_model("llama"), attention_mask=everything)
    refusal(lambda: run_tapped(tiny_model("falcon"), attention_mask=everything), "mask")


def test_packed_sequences_are_refused():
    """Positions that begin anew would hide the first text from the second."""
    positions = torch.cat([torch.arange(T // 2), torch.arange(T // 2)])[None].expand(2, -1)
    refusal(lambda: run_tapped(tiny_model("llama"), position_ids=positions), "packed")


def test_a_cache_is_refused():
    model = tiny_model("llama")
    with torch.no_grad():
        cache = model(tokens(), use_cache=True).past_key_values
    refusal(lambda: run_tapped(model, past_key_values=cache), "cache")


# Arguments to attention


def test_an_unknown_argument_to_attention_is_refused():
    model = tiny_model("llama")
    bias = torch.zeros(2, 4, T, T)
    refusal(lambda: run_tapped(model, attention_bias=bias), "attention_bias")
    refusal(lambda: run_tapped(model, is_causal=False), "causal")
    # Controls: what changes nothing goes through, and so does an unknown argument that is off.
    run_tapped(model, attention_bias=None)
    run_tapped(model, is_causal=True)


def test_dropout_in_attention_is_refused():
    model = tiny_model("llama", attention_dropout=0.5)
    model.train()
    refusal(lambda: run_tapped(model), "dropout")


# Families and their options


def test_falcon_with_alibi_is_refused():
    refusal(lambda: trace(tiny_model("falcon", alibi=True), tokens()), "alibi", "falcon")


def test_gemma3_that_sees_the_future_is_refused():
    refusal(lambda: trace(tiny_model("gemma3", use_bidirectional_attention=True), tokens()), "causal")


def test_opt_with_a_normalised_residual_stream_is_refused():
    refusal(lambda: trace(tiny_model("opt", do_layer_norm_before=False), tokens()), "do_layer_norm_before", "opt")


OUTSIDERS = {
    "bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=2)),
    "gptj": lambda: GPTJForCausalLM(GPTJConfig(vocab_size=97, n_embd=32, n_layer=1, n_head=2, rotary_dim=8)),
}


@pytest.mark.parametrize("model_type", OUTSIDERS)
def test_attention_that_nobody_can_be_asked_for_is_refused(model_type):
    """The message names the family, what is missing, and what to do."""
    told = (f"'{model_type}'", "does not ask the attention interface of transformers", "`sinkscope_anatomy`")
    refusal(lambda: trace(OUTSIDERS[model_type](), tokens()), *told)


# Lengths and keys


def test_a_text_longer_than_the_context_is_refused():
    refusal(lambda: trace(tiny_model("llama", max_position_embeddings=32), tokens(33)), "32", "33")
    trace(tiny_model("llama", max_position_embeddings=32), tokens(32))


@pytest.mark.parametrize("keys", [[T], [0, T + 5], [-1], []])
def test_keys_outside_the_text_are_refused(keys):
    refusal(
        lambda: trace(tiny_model("llama"), tokens(), keys=keys),
        f"`keys` must be positions from 0 to {T - 1}" if keys else "`keys=[0, 10]`",
    )


def test_the_last_key_goes_through():
    assert trace(tiny_model("llama"), tokens(), keys=[T - 1]).recording.keys.tolist() == [T - 1]


def test_ids_outside_the_vocabulary_are_refused():
    ids = tokens()
    ids[1, 5] = 97
    refusal(lambda: trace(tiny_model("llama"), ids), "97")


# Dropout


@pytest.mark.parametrize(
    ("family", "dropout"),
    [
        ("llama", dict(attention_dropout=0.5)),
        ("gpt2", dict(attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)),
        ("opt", dict(dropout=0.5, attention_dropout=0.5)),
        ("falcon", dict(hidden_dropout=0.5, attention_dropout=0.5)),
    ],
)
def test_a_model_in_training_mode_is_traced_without_dropout_and_put_back(family, dropout):
    quiet, ids = trace(tiny_model(family, **dropout), tokens()), tokens()
    model = tiny_model(family, **dropout).train()
    model.get_decoder().eval()  # a mixture of modes, each to be put back
    next(iter(model.get_decoder().children())).train()
    modes = [module.training for module in model.modules()]
    assert True in modes
    assert False in modes
    found = trace(model, ids)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(found.recording["received"], quiet.recording["received"])
    # Control: dropout would have shown.
    model.train()
    with torch.no_grad():
        first, second = (model(ids, use_cache=False).logits for _ in range(2))
    assert not torch.equal(first, second)
