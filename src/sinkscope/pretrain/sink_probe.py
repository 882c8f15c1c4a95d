"""SinkProbe: the probes of `sinkscope pretrain` inside the Hugging Face Trainer.

    trainer = Trainer(model, args, train_dataset=..., callbacks=[sinkscope.SinkProbe(every=100)])

Rows go to probes.jsonl in the output folder, the numbers of the whole model also to the trainer's log history.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sinkscope.errors import InputError
from sinkscope.models.token_batches import TokenBatch
from sinkscope.pretrain.metrics_log import JsonLines, read_rows
from sinkscope.pretrain.probes import probe, random_batch


class SinkProbe(TrainerCallback):
    """Reads the six observables before training and every `every` steps, on random tokens or on a batch given."""

    def __init__(
        self, every: int = 100, *, batch: TokenBatch | None = None, length: int = 64, num_sequences: int = 32
    ) -> None:
        if every < 1:
            raise InputError(expected="at least 1 step between probes", found=str(every), next_step="Raise every")
        self.every = every
        self.batch = batch
        self.length = length
        self.num_sequences = num_sequences
        self.rows: list[dict[str, Any]] = []
        """What was read so far, as in probes.jsonl."""
        self._file: JsonLines | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if not state.is_world_process_zero:
            return
        if self.batch is None:
            self.batch = random_batch(kwargs["model"], length=self.length, num_sequences=self.num_sequences)
        folder = Path(args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "probes.jsonl"
        # The row of the step that training is resumed at was written before.
        kept = read_rows(path) if state.global_step and path.exists() else []
        self._file = JsonLines(path, [row for row in kept if row["step"] <= state.global_step])
        if not state.global_step:
            self._probe(state, kwargs["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if state.is_world_process_zero and state.global_step % self.every == 0:
            self._probe(state, kwargs["model"])

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _probe(self, state: TrainerState, model: Any) -> None:
        assert self.batch is not None
        assert self._file is not None
        result = probe(model, self.batch)
        tokens = int(state.num_input_tokens_seen)
        row = {"step": state.global_step, "tokens": tokens, "batch": self.batch.kind, **result.row()}
        self.rows.append(row)
        self._file.write(row)
        numbers = {name: value for name, value in result.whole.items() if value is not None}
        state.log_history.append({"step": state.global_step, **numbers})
