"""Hugging Face's Trainer with `PacelineMixin`, against the same Trainer on one device."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from frameworks_support import TWO, difference, within
from paceline.torch import ProofWarning
from paceline.transformers import PacelineMixin


class Parallel(PacelineMixin, Trainer):
    data_parallel_options: ClassVar[dict[str, Any]] = {"devices": TWO, "balance": [1, 2]}


SMALL = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, max_position_embeddings=32)).double()


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
    assert difference(ours, theirs) < tolerance


def bert() -> Any:
    torch.manual_seed(0)
    config = BertConfig(**SMALL, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForSequenceClassification(config).double()


def test_training_a_classifier_is_that_of_one_device(tmp_path: Any) -> None:
    theirs, wanted = train(Trainer, bert(), tmp_path, classified)
    for options in ({}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}):
        ours, got = train(Parallel, bert(), tmp_path, classified, **options)
        assert [loss for loss, _ in got] == pytest.approx([loss for loss, _ in wanted], rel=1e-6)
        assert within(difference(ours, theirs), 1e-10)


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


@pytest.mark.parametrize("steps", [1, 2])
def test_batches_without_labels_do_what_they_do_on_one_device(steps: int, tmp_path: Any) -> None:
    def masked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = pad(samples)
        nothing = next(batches) in (0, 3, 4, 5)
        return {**batch, "labels": torch.full_like(batch["labels"], -100)} if nothing else batch

    runs = []
    for kind in (Parallel, Trainer):
        batches = iter(range(6))
        runs.append(train(kind, llama(), tmp_path, masked, max_steps=6 // steps, gradient_accumulation_steps=steps))
    (ours, got), (theirs, wanted) = runs
    assert len(got) == 6 // steps
    assert got == [pytest.approx(pair, rel=1e-5, nan_ok=True) for pair in wanted]
    assert difference(ours, theirs) < 1e-5


class Plain(Trainer):
    """For models that do not take ``num_items_in_batch``: the Trainer divides the loss by the number of accumulated batches."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.model_accepts_loss_kwargs = False


class OwnLoss(Plain):
    """As the documentation of transformers shows it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**{key: value for key, value in inputs.items() if key != "labels"})
        loss = smoothed_sum(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class Before(PacelineMixin, Plain):
    compute_loss = OwnLoss.compute_loss


class Outputs(Parallel):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:  # type: ignore[override]
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        return (loss, outputs) if return_outputs else loss


class After(PacelineMixin, OwnLoss):
    data_parallel_options: ClassVar[dict[str, Any]] = {"devices": TWO, "balance": [1, 2]}


@pytest.mark.parametrize(("kind", "reference"), [(Before, OwnLoss), (Outputs, Trainer)])
def test_a_loss_that_does_not_reach_the_devices_warns_once(kind: Any, reference: Any, tmp_path: Any) -> None:
    options = {"max_steps": 2, "gradient_accumulation_steps": 2}
    with pytest.warns(UserWarning, match=f"compute_loss of {kind.__name__} trains on one device") as found:
        _, got = train(kind, llama(), tmp_path, **options)
    assert len([one for one in found if "PacelineMixin" in str(one.message)]) == 1
    _, wanted = train(reference, llama(), tmp_path, **options)
    assert got == [pytest.approx(pair, rel=1e-6) for pair in wanted]


def test_a_loss_in_a_class_after_the_mixin_runs_on_the_devices(tmp_path: Any) -> None:
    options = {"max_steps": 2, "gradient_accumulation_steps": 2}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "PacelineMixin")
        ours, got = train(After, llama(), tmp_path, **options)
    theirs, wanted = train(OwnLoss, llama(), tmp_path, **options)
    assert got == [pytest.approx(pair, rel=1e-6) for pair in wanted]
    assert difference(ours, theirs) < 1e-10


@pytest.mark.parametrize(("coefficient", "warned"), [(0.5, 1), (0.0, 0)])
def test_router_losses_warn(coefficient: float, warned: int, tmp_path: Any) -> None:
    options = {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
    config = MixtralConfig(**SMALL, **options, router_aux_loss_coef=coefficient)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(Parallel, MixtralForCausalLM(config), tmp_path, max_steps=1)
    assert sum("adds a router loss" in str(one.message) for one in found) == warned


class Reordered(Trainer):
    """Has another second argument than the Trainer, as TRL's trainers have."""

    def __init__(self, model: Any = None, reference: Any = None, args: Any = None, **options: Any) -> None:
        super().__init__(model, args, **options)
        self.reference = reference


class ParallelReordered(PacelineMixin, Reordered):
    data_parallel_options: ClassVar[dict[str, Any]] = {"devices": TWO}


@pytest.mark.parametrize("by_name", [True, False])
def test_the_training_arguments_may_be_any_argument(by_name: bool, tmp_path: Any) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    if by_name:
        trainer = ParallelReordered(model=llama(), args=arguments, train_dataset=sentences(), data_collator=pad)
    else:
        trainer = ParallelReordered(llama(), "the other", arguments, train_dataset=sentences(), data_collator=pad)
    assert trainer.args is arguments
    assert trainer.reference == (None if by_name else "the other")
    assert trainer.args.n_gpu <= 1


CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 30.0], dtype=torch.float64)


class ByClass(Plain):
    """The weighted loss of the documentation of transformers."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**{key: value for key, value in inputs.items() if key != "labels"})
        loss = nn.functional.cross_entropy(outputs.logits, inputs["labels"], weight=CLASS_WEIGHTS)
        return (loss, outputs) if return_outputs else loss


class AfterByClass(PacelineMixin, ByClass):
    data_parallel_options: ClassVar[dict[str, Any]] = {"devices": TWO, "balance": [1, 2], "prove": "warn"}


class Weighted(AfterByClass):
    def data_parallel_loss_options(self, inputs: Any) -> dict[str, Any]:
        return {"weight": CLASS_WEIGHTS[inputs["labels"]]}


def test_class_weights_are_warned_of_and_may_be_given(tmp_path: Any) -> None:
    options = {"max_steps": 3, "gradient_accumulation_steps": 2}
    with (
        pytest.warns(ProofWarning, match="another result than on one device"),
        pytest.warns(UserWarning, match="training continues on one device. A split changes the result"),
    ):
        train(AfterByClass, bert(), tmp_path, classified, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ProofWarning)
        _, got = train(Weighted, bert(), tmp_path, classified, **options)
    _, wanted = train(ByClass, bert(), tmp_path, classified, **options)
    assert got == [pytest.approx(pair, rel=1e-6) for pair in wanted]


class Preferred(Plain):
    """Pairs the rows of the first half with those of the second one, as trainers of preferences do."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        ids = inputs["input_ids"]
        scores = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).sum((1, 2))
        chosen, rejected = scores.chunk(2)
        return -nn.functional.logsigmoid(chosen - rejected).mean()


class AfterPreferred(PacelineMixin, Preferred):
    data_parallel_options: ClassVar[dict[str, Any]] = {"devices": TWO, "balance": "even", "prove": "warn"}


class AfterOdd(AfterPreferred):
    data_parallel_options: ClassVar[dict[str, Any]] = {"devices": TWO, "balance": [3, 5], "prove": "warn"}


def packed(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All sentences in one row, with the positions where they begin."""
    ids = torch.cat([sample["input_ids"] for sample in samples])
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    return {
        "input_ids": ids[None],
        "labels": ids[None],
        "cu_seq_lens_q": torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
    }


class Unpacks(Plain):
    """Leaves out what the model for tests does not take."""

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        inputs = {key: value for key, value in inputs.items() if key != "cu_seq_lens_q"}
        return super().compute_loss(model, inputs, *arguments, **options)


class AfterUnpacks(PacelineMixin, Unpacks):
    data_parallel_options: ClassVar[dict[str, Any]] = {"devices": TWO, "prove": "warn"}


@pytest.mark.parametrize(
    ("ours", "plain", "collate", "why"),
    [
        (AfterPreferred, Preferred, pad, "A split changes the result"),
        (AfterOdd, Preferred, pad, "A batch cannot be split: The size of tensor a"),
        (AfterUnpacks, Unpacks, packed, r"A batch cannot be split: batch: batch\['cu_seq_lens_q'\] has 9 items"),
    ],
    ids=["pairs", "pairs in odd slices", "packed"],
)
@pytest.mark.filterwarnings("ignore:step. split over")
def test_what_cannot_be_split_trains_on_one_device_with_a_warning(
    ours: Any, plain: Any, collate: Any, why: str, tmp_path: Any
) -> None:
    options = {"max_steps": 3, "gradient_accumulation_steps": 2}
    with pytest.warns(UserWarning, match=f"training continues on one device. {why}"):
        _, got = train(ours, llama(), tmp_path, collate, **options)
    _, wanted = train(plain, llama(), tmp_path, collate, **options)
    assert got == [pytest.approx(pair, rel=1e-6) for pair in wanted]
