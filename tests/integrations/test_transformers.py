"""Hugging Face's Trainer with `PacelineMixin`, against the same Trainer on one device."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from frameworks_support import within
from paceline.transformers import PacelineMixin

TWO = ["host:0", "host:1"]


class Parallel(PacelineMixin, Trainer):
    data_parallel_options: ClassVar[dict[str, Any]] = {"devices": TWO, "balance": [1, 2]}


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config).double()


def sentences(items: int = 48) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 17, (items,), generator=generator)
    return [{"input_ids": torch.randint(1, 50, (int(length),), generator=generator)} for length in lengths]


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([one["input_ids"] for one in samples], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def classified(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = pad(samples)
    return {**batch, "labels": batch["input_ids"][:, 0] % 3}


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.found.append((logs["loss"], logs["grad_norm"]))


def train(
    kind: Any, model: Any, folder: Any, collate: Any = pad, **options: Any
) -> tuple[Any, list[tuple[float, float]]]:
    losses = Losses()
    functions = {key: options.pop(key) for key in ("compute_loss_func",) if key in options}
    arguments = TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, learning_rate=1e-2,
        disable_tqdm=True, **{"per_device_train_batch_size": 8, **options},
    )  # fmt: skip
    kind(model, arguments, train_dataset=sentences(), data_collator=collate, callbacks=[losses], **functions).train()
    return model, losses.found


def smoothed_sum(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = nn.functional.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1)
    return total / (num_items_in_batch if num_items_in_batch is not None else (targets != -100).sum())


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-5),
        ({"gradient_accumulation_steps": 2}, 1e-5),
        ({"gradient_accumulation_steps": 4, "max_grad_norm": 0.1}, 1e-5),
        ({"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}, 1e-5),
        ({"compute_loss_func": smoothed_sum, "gradient_accumulation_steps": 2}, 1e-10),
    ],
    ids=["plain", "accumulation", "clipping", "label smoothing", "a loss of one's own"],
)
def test_training_a_language_model_is_that_of_one_device(
    options: dict[str, Any], tolerance: float, tmp_path: Any
) -> None:
    ours, got = train(Parallel, llama(), tmp_path, **options)
    theirs, wanted = train(Trainer, llama(), tmp_path, **options)
    assert [loss for loss, _ in got] == pytest.approx([loss for loss, _ in wanted], rel=1e-6)
    assert [norm for _, norm in got] == pytest.approx([norm for _, norm in wanted], rel=1e-5)
    worst = max((a - b).abs().max().item() for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert worst < tolerance


def test_training_a_classifier_is_that_of_one_device(tmp_path: Any) -> None:
    def bert() -> Any:
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_labels=3,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return BertForSequenceClassification(config).double()

    theirs, wanted = train(Trainer, bert(), tmp_path, classified)
    for options in ({}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}):
        ours, got = train(Parallel, bert(), tmp_path, classified, **options)
        assert [loss for loss, _ in got] == pytest.approx([loss for loss, _ in wanted], rel=1e-6)
        worst = max((a - b).abs().max().item() for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
        assert within(worst, 1e-10)


def test_bf16_runs_on_the_devices(tmp_path: Any) -> None:
    model, seen = llama().float(), set()
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    _, got = train(Parallel, model, tmp_path, bf16=True)
    assert seen == {torch.bfloat16}
    _, wanted = train(Trainer, llama().float(), tmp_path, bf16=True)
    assert [loss for loss, _ in got] == pytest.approx([loss for loss, _ in wanted], abs=2e-2)


def test_evaluation_and_a_callback_that_asks_for_the_shares(tmp_path: Any) -> None:
    shares: list[dict[str, int]] = []

    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            assert trainer.data_parallel is not None
            shares.append(trainer.data_parallel.shares)

    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=9, max_steps=3, save_strategy="no", report_to=[], use_cpu=True,
        eval_strategy="steps", eval_steps=2, disable_tqdm=True,
    )  # fmt: skip
    trainer = Parallel(
        llama(), arguments, train_dataset=sentences(), eval_dataset=sentences(8), data_collator=pad, callbacks=[Asks()]
    )
    trainer.train()
    assert shares == [{"host:0": 3, "host:1": 6}] * 3
    assert trainer.data_parallel is None
    assert trainer.evaluate()["eval_loss"] > 0
