"""Hugging Face's `transformers.Trainer` on all devices of one machine: `PacelineMixin`.

Needs transformers 5 and PyTorch, which this package does not install by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from paceline import Error, InvalidArgument
from paceline.torch import DataParallel
from paceline.torch._devices.failures import warn_caller

__all__ = ["PacelineMixin"]


class PacelineMixin:
    """Lets a `transformers.Trainer` run each training batch on all devices: ``class MyTrainer(PacelineMixin, Trainer)``.

    ``per_device_train_batch_size`` is the batch of the whole process, however many devices it has. The loss, its normalisation over all
    tokens of the accumulated batches (``num_items_in_batch``), label smoothing, ``compute_loss_func`` and mixed precision are those of the
    Trainer on one device. Evaluation and prediction run on the model's own device.

    `data_parallel_options`, an attribute of your class, has further arguments of `paceline.torch.DataParallel`, such as
    ``{"devices": ["host:0", "host:1"]}``. `data_parallel` is that object while ``train`` runs; ``trainer.data_parallel.explain()``, called
    in a callback, says what it does.

    Checkpoints have one more file, ``paceline_0.pt``: `DataParallel.training_state`, with the states of all GPUs' random generators, of which the
    Trainer saves the current one only. ``resume_from_checkpoint`` goes on from it, on any devices.

    Some models ignore ``num_items_in_batch``, such as `BertForSequenceClassification`. The Trainer on one device then adds the means of
    accumulated batches up without dividing by their number. Here the gradient is that of the mean over all of them.

    A batch whose labels are all -100 runs on the model's own device, where its loss is what the model makes of no labels.

    A ``compute_loss`` of your own runs once per slice if it is the one of a class after the mixin: ``class MyTrainer(PacelineMixin, MyOwn)``. One
    in `MyTrainer` itself replaces the mixin's. It has to call ``super().compute_loss`` without `return_outputs`, or batches run on the model's
    own device, which ``train`` warns of.

    The first training step is proved (see `DataParallel`). If a split changes the result, as for a mean over something else than labels or a batch of
    chosen and rejected answers, a warning says so, with the cure if it is found, and training continues on one device. So it does if the first batch
    cannot be cut, as with ``packing=True`` and its ``cu_seq_lens``, or fails in slices only. `data_parallel_loss_options` is the place for the cure. With several processes
    it is only warned of.

    Router losses of mixtures of experts (``config.output_router_logits``) are not those of one device. They couple the items of a batch. Here
    each slice has its own, and they are weighted by labels. ``train`` warns of this.

    Raises
    ------
    InvalidArgument
        If the arguments ask for something that needs the whole batch on one device.

    Examples
    --------
    >>> class MyTrainer(PacelineMixin, Trainer):                                     # doctest: +SKIP
    ...     data_parallel_options = {"devices": "auto"}
    >>> MyTrainer(model, arguments, train_dataset=data).train()                      # doctest: +SKIP
    """

    data_parallel_options: ClassVar[dict[str, Any]] = {}
    data_parallel: DataParallel | None = None
    _split = False  # whether a batch has run on the devices
    _alone = False  # whether one device trains, since a split would change the result
    _reached = False  # whether `compute_loss` was called for training, or the warning was given that it is not

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # The training arguments are the second argument of some classes, and the third of others.
        for one in (*arguments, *options.values()):
            if hasattr(type(one), "n_gpu"):
                one._n_gpu = min(one.n_gpu, 1)  # otherwise the Trainer wraps the model in nn.DataParallel
        super().__init__(*arguments, **options)
        trainer: Any = self
        trainer.args._n_gpu = min(trainer.args.n_gpu, 1)  # also where the arguments are the default ones
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise InvalidArgument(
                "PacelineMixin: FSDP and DeepSpeed split the model over processes of their own, one for each GPU. Use a plain Trainer with these, or "
                "leave them out."
            )
        if trainer.args.torch_compile:
            raise InvalidArgument(
                "PacelineMixin: torch_compile=True compiles the model before it is copied for the devices. Pass a model with "
                "torch.compile(model.forward) of its own, or leave it out."
            )

    def train(self, *arguments: Any, **options: Any) -> Any:
        """As `Trainer.train`. The devices' workers end with it."""
        try:
            return super().train(*arguments, **options)  # type: ignore[misc]
        finally:
            if self.data_parallel is not None:
                self.data_parallel.close()
                self.data_parallel = None

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        """As `Trainer.training_step`. Warns once if the batch did not reach the devices."""
        loss = super().training_step(*arguments, **options)  # type: ignore[misc]
        if not self._reached:
            self._reached = True
            warn_caller(
                f"PacelineMixin: compute_loss of {type(self).__name__} trains on one device. It did not call PacelineMixin.compute_loss, or it asked "
                f"for outputs, which only one device has. Move it to a class after the mixin, class {type(self).__name__}(PacelineMixin, MyOwn), or "
                "call super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch) in it.",
                UserWarning,
            )
        return loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As `Trainer.compute_loss`, on all devices where the loss is for training and the outputs are not asked for."""
        trainer: Any = self
        one_device = super().compute_loss  # type: ignore[misc]
        if self._alone:
            vars(self).pop("loss_is_scaled_for_ga", None)
        if return_outputs or self._alone or not torch.is_grad_enabled():
            return one_device(model, inputs, return_outputs, num_items_in_batch)
        self._reached = True
        own = self.data_parallel_loss_options(inputs)
        shifted = trainer._loss_shifts_labels

        def loss_fn(module: Any, part: Any) -> Any:
            """The mean over the labels of the slice."""
            labels = None if trainer.compute_loss_func is None else _labels_per_item(part, shifted=shifted)
            return one_device(module, part, num_items_in_batch=None if labels is None else labels.sum())

        weight = own.get("weight", _labels_per_item(inputs, shifted=shifted))
        items = None if "weight" in own else num_items_in_batch
        if items is None:
            empty = weight is not None and not weight.any() and trainer.accelerator.num_processes == 1
        else:
            empty = items == 0  # in all processes
        if items is not None and trainer.args.average_tokens_across_devices:
            # The processes average gradients.
            items = items / (trainer.accelerator.num_processes // trainer.get_tp_size())
        if empty:  # there is nothing to divide by
            loss = one_device(model, inputs, num_items_in_batch=num_items_in_batch)
        else:
            scaler = getattr(trainer.accelerator, "scaler", None)
            given = {"weight": weight, "total": items, "scaler": scaler, **own}
            try:
                loss = self._parallel().loss(loss_fn, inputs, **given)
            except Exception as error:
                if own or self._split or trainer.accelerator.num_processes > 1 or not _is_of_a_slice(error):
                    raise
                # If one device cannot run the batch either, its own error is raised.
                loss = one_device(model, inputs, num_items_in_batch=num_items_in_batch)
                self._train_alone(f"A batch cannot be split: {error}")
                vars(self).pop("loss_is_scaled_for_ga", None)
                return loss
            self._split = True
            if self._parallel().differs and trainer.accelerator.num_processes == 1:
                self._train_alone("A split changes the result, as the ProofWarning says.")
        # Accumulated losses are divided below, and the Trainer must not divide them again.
        self.loss_is_scaled_for_ga = True
        return loss if items is not None else loss / trainer.current_gradient_accumulation_steps

    def data_parallel_loss_options(self, inputs: Any) -> dict[str, Any]:
        """Further arguments of `DataParallel.loss` for a batch: ``weight=``, ``total=``, ``split=``, ``batch_dim=``, ``cost=``. Yours to override.

        For a loss that is a mean over something else than labels, give its weights: ``{"weight": class_weights[inputs["labels"]]}``. The mean is then
        over the batch, and accumulated batches count alike.
        """
        return {}

    def _train_alone(self, why: str) -> None:
        self._alone = True
        warn_caller(
            f"PacelineMixin: training continues on one device. {why} data_parallel_loss_options(inputs) may say weight= or split= for the batch. "
            'data_parallel_options = {"prove": False} splits it without a proof.',
            UserWarning,
        )

    def _parallel(self) -> DataParallel:
        trainer: Any = self
        if self.data_parallel is None:
            module = trainer.accelerator.unwrap_model(trainer.model)
            _warn_of_router_losses(getattr(module, "config", None))
            # Of several processes the Trainer averages the gradients.
            self.data_parallel = DataParallel(module, **{"group": "alone"} | self.data_parallel_options)
        return self.data_parallel

    def _save_rng_state(self, output_dir: str) -> None:
        """The Trainer calls this for each checkpoint."""
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        if self.data_parallel is not None:
            torch.save(self.data_parallel.training_state(), self._state_file(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The Trainer calls this after `_load_from_checkpoint`, when the next thing to draw random numbers is training."""
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        if checkpoint is not None and (file := self._state_file(checkpoint)).exists():
            self._parallel().load_training_state(torch.load(file, weights_only=True))

    def _state_file(self, checkpoint: str) -> Path:
        """Each process draws random numbers of its own."""
        return Path(checkpoint) / f"paceline_{self.args.process_index}.pt"  # type: ignore[attr-defined]


def _is_of_a_slice(error: Exception) -> bool:
    """Whether an error may come from cutting the batch."""
    return isinstance(error, InvalidArgument) or not isinstance(error, (Error, torch.OutOfMemoryError))


def _labels_per_item(inputs: Any, *, shifted: bool) -> torch.Tensor | None:
    """How many labels of each item count in the loss. The Trainer counts the same for ``num_items_in_batch``."""
    labels = inputs.get("shift_labels", inputs.get("labels"))
    if not isinstance(labels, torch.Tensor):
        return None
    if shifted and "shift_labels" not in inputs:
        labels = labels[..., 1:]
    counts: torch.Tensor = labels.ne(-100).reshape(len(labels), -1).sum(1)
    return counts


def _warn_of_router_losses(config: Any) -> None:
    """Of a mixture of experts, also inside of a model for text and images."""
    for one in (config, getattr(config, "text_config", None)):
        if getattr(one, "output_router_logits", False) and getattr(one, "router_aux_loss_coef", 1) != 0:
            warn_caller(
                "PacelineMixin: output_router_logits=True adds a router loss, which couples the items of a batch. Each slice has its own here, so "
                "loss and gradients are not those of one device. Set config.output_router_logits = False to train without it.",
                UserWarning,
            )
            return
