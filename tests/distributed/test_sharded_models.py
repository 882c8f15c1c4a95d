"""Two gloo processes share one model's weights: probe, SinkProbe and trace read what one process reads."""

import copy
import json
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_processes import in_two_processes
from planted_models import VOCABULARY, planted_chain
from tiny_models import tiny_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.distributed import DistributedConfig

import sinkscope
from sinkscope.errors import InputError
from sinkscope.models import sharded

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from own_gpt import OwnGPT

IDS = torch.randint(3, VOCABULARY, (6, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """A forked process cannot wait for threads that it doesn't have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def planted():
    return planted_chain(0)[0]


def shard(model, *, blocks=True, dtype=None):
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for layer in sinkscope.anatomy_of(model).layers if blocks else ():
        fully_shard(layer.block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def checkpointed(model):
    """As torchtitan does it: each block is wrapped for recomputation, compiled, then sharded."""
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
    for block in model.blocks:
        block.compile(backend="eager")
        fully_shard(block)
    return fully_shard(model)


def compiled(model):
    model.gradient_checkpointing_enable()
    for layer in sinkscope.anatomy_of(model).layers:
        layer.block.compile(backend="eager")
    return shard(model)


def update(model, ids):
    """What a training loop does between two probes."""
    model.train()
    output = model(ids)
    torch.as_tensor(getattr(output, "logits", output)).float().square().mean().backward()
    model.zero_grad()


SPREAD = {
    "blocks": (planted, shard),
    "the whole": (planted, lambda model: shard(model, blocks=False)),
    "in bfloat16": (planted, lambda model: shard(model, dtype=torch.bfloat16)),
    "compiled": (planted, compiled),
    "post-norms": (lambda: tiny_model("gemma3"), shard),
    "experts": (lambda: tiny_model("qwen3_moe"), shard),
    "not of transformers": (OwnGPT, checkpointed),
    "ddp": (planted, torch.nn.parallel.DistributedDataParallel),
}


@pytest.mark.parametrize("spread", SPREAD)
def test_two_processes_read_what_one_reads(spread, tmp_path):
    make, share = SPREAD[spread]
    torch.manual_seed(0)
    model = make()
    expected = sinkscope.probe(copy.deepcopy(model), IDS)
    # Neurons are removed only from a model that is whole.
    traced = sinkscope.trace(copy.deepcopy(model), IDS, test=spread == "ddp")

    def work():
        dist.init_process_group("gloo")
        shared, rank = share(model), dist.get_rank()
        for number in range(2):
            if rank == 0 or spread != "ddp":  # a whole model is read by the process that asks
                # Every process reads what rank 0 asks for.
                result = sinkscope.probe(shared, (IDS + rank) % VOCABULARY).row()
                (tmp_path / f"{rank}-{number}.json").write_text(json.dumps(result))
            update(shared, IDS)
        if rank == 0 or spread != "ddp":
            trace = sinkscope.trace(shared, IDS)
            receipt = trace.receipt
            text = [trace.story, receipt.weights, "sharded" in receipt.states]
            (tmp_path / f"{rank}-trace.json").write_text(json.dumps(text))
        dist.destroy_process_group()

    in_two_processes(work)
    tolerance = {"rel": 0.2, "abs": 0.05} if spread == "in bfloat16" else {"rel": 1e-4, "abs": 1e-6}
    for file in tmp_path.glob("*-?.json"):
        result = json.loads(file.read_text())
        assert result["whole"] == pytest.approx(expected.whole, **tolerance)
        for name, values in expected.layers.items():
            for value, of_one in zip(result["layers"][name], values, strict=True):
                assert value == (of_one and pytest.approx(of_one, **tolerance)), name
    for file in tmp_path.glob("*-trace.json"):
        story, weights, is_sharded = json.loads(file.read_text())
        assert is_sharded == (spread != "ddp")
        # Wrapping for recomputation renames the weights.
        assert weights == traced.receipt.weights or spread == "not of transformers"
        assert story == traced.story or spread == "in bfloat16"
    assert len(list(tmp_path.iterdir())) == (3 if spread == "ddp" else 6)
    if make is planted:
        assert expected.whole["num_sinks"] == 1, "there is something to find"


def test_a_tensor_parallel_plan_is_read(tmp_path):
    planted().save_pretrained(tmp_path / "model")
    expected = sinkscope.probe(planted(), IDS).row()

    def work():
        dist.init_process_group("gloo")
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", distributed_config=DistributedConfig(tp_size=2, tp_plan="auto")
        )
        assert sharded.is_tensor_parallel(model)
        result = sinkscope.probe(model, IDS).row()
        (tmp_path / f"{dist.get_rank()}.json").write_text(json.dumps(result))
        with pytest.raises(InputError, match="tensor-parallel"):
            sinkscope.insert_head_norm(model)
        dist.destroy_process_group()

    in_two_processes(work)
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == expected


@pytest.mark.parametrize("order", ["inserted first", "sharded first"])
def test_inserted_norms_train_as_in_one_process(order, tmp_path):
    def trained(model, ids):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(ids).logits.square().mean().backward()
            optimiser.step()
            optimiser.zero_grad()
        return {name: sharded.whole(p.detach()) for name, p in model.named_parameters() if "head_norm" in name}

    model = tiny_model("llama")

    def work():
        dist.init_process_group("gloo")
        if order == "inserted first":
            sinkscope.insert_head_norm(model)
        shared = shard(model)
        if order == "sharded first":
            sinkscope.insert_head_norm(shared)
        norms = trained(shared, IDS[dist.get_rank() :: 2])
        sinkscope.probe(shared, IDS)
        torch.save(norms, tmp_path / f"{dist.get_rank()}.pt")
        dist.destroy_process_group()

    in_two_processes(work)
    sinkscope.insert_head_norm(model)
    expected = trained(model, IDS)
    assert len(expected) == 6
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected)
    control = tiny_model("llama")
    sinkscope.insert_head_norm(control)
    with pytest.raises(AssertionError):  # half of the batch, as if gradients were not shared
        torch.testing.assert_close(trained(control, IDS[::2]), expected)


def test_ddp_takes_no_norms_afterwards():
    with pytest.raises(InputError, match="Insert them first"):
        in_ddp = torch.nn.parallel.DistributedDataParallel
        sinkscope.insert_head_norm(object.__new__(in_ddp))


def test_a_process_that_reads_alone_is_told(tmp_path, monkeypatch):
    model = planted()
    monkeypatch.setattr(sharded, "PATIENCE", timedelta(seconds=1))

    def work():
        dist.init_process_group("gloo")
        shared = shard(model)
        if dist.get_rank() == 0:
            with pytest.raises(InputError, match=r"spread over 2 processes, and not all .* on every rank"):
                sinkscope.probe(shared, IDS)

    in_two_processes(work)


def test_a_sink_probe_of_a_sharded_model_is_written_by_rank_0(tmp_path):
    """By the calls of a Trainer, which shards with FSDP2 on a GPU alone."""
    model, expected = planted(), sinkscope.probe(planted(), IDS)
    batch = sinkscope.TokenBatch(ids=IDS, kind="given")

    def work():
        dist.init_process_group("gloo")
        shared, logged = shard(model), []
        state = TrainerState(is_world_process_zero=dist.get_rank() == 0, num_input_tokens_seen=0)
        arguments, control = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]), TrainerControl()
        callback = sinkscope.SinkProbe(logged.append, every=2, batch=batch)
        callback.on_train_begin(arguments, state, control, model=shared)
        for state.global_step in (1, 2):
            update(shared, IDS)
            callback.on_step_end(arguments, state, control, model=shared)
        callback.on_train_end(arguments, state, control, model=shared)
        assert len(logged) == len(callback.rows) == (2 if dist.get_rank() == 0 else 0)
        dist.destroy_process_group()

    in_two_processes(work)
    rows = [json.loads(line) for line in (tmp_path / "probes.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 2]
    for row in rows:
        assert row["whole"] == pytest.approx(expected.whole)


def test_the_trainer_probes_in_two_processes(tmp_path):
    model = planted()

    def train(folder):
        arguments = TrainingArguments(
            str(folder), max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no",
            learning_rate=0.0, disable_tqdm=True,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in IDS]
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.add_callback(sinkscope.SinkProbe(trainer.log, every=1, length=32, num_sequences=6))
        trainer.train()

    in_two_processes(lambda: train(tmp_path / "two"))
    train(tmp_path / "one")
    two, one = ((tmp_path / name / "probes.jsonl").read_text().splitlines() for name in ("two", "one"))
    two, one = [json.loads(line) for line in two], [json.loads(line) for line in one]
    assert [row["step"] for row in two] == [row["step"] for row in one] == [0, 1, 2]
    for row, expected in zip(two, one, strict=True):
        assert row["whole"] == pytest.approx(expected["whole"])
