"""`DataParallel`: the training step over all devices of one machine."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import torch
from torch import nn

from paceline import InvalidArgument
from paceline._observe import check_observe
from paceline._words import require, require_one_of
from paceline.balance import WhatIfAnswer, Worth
from paceline.comm import Transport
from paceline.torch._batch.objective import Reduction
from paceline.torch._devices.places import places_of
from paceline.torch._features.every import every_feature
from paceline.torch._features.synchronised import SynchronisedNorms
from paceline.torch._features.watchdog import Watchdog
from paceline.torch._replicas.buffer_rules import BufferRule, BufferRules
from paceline.torch._replicas.common import Common
from paceline.torch._replicas.copies import Replicate
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.alone import AloneTrials
from paceline.torch._run.execution import Execution
from paceline.torch._run.graphs import Graphs
from paceline.torch._run.reducer import Reducer
from paceline.torch._run.source import Shares
from paceline.torch._trainer.arguments import (
    Balance,
    BatchNorm,
    Devices,
    Memory,
    check_batch_norm,
    check_count,
    check_devices,
    check_graphs,
    check_hold_back,
    check_module,
    check_reduce_dtype,
    check_timeout,
    group_of,
    is_whole,
    micro_batch_limits,
    numbered,
    output_of,
    policy_of,
    watchdog_folder,
)
from paceline.torch._trainer.base import Trainer
from paceline.torch._trainer.data import Data
from paceline.torch._trainer.launched import Group, check_ranks_meet, ranks_of
from paceline.torch._trainer.module import AsModule
from paceline.torch._trainer.observed import show
from paceline.torch._trainer.parts import Core, carried_out_by
from paceline.torch._trainer.passes import Passes
from paceline.torch._trainer.proofs import Prove, prove_of
from paceline.torch._trainer.reports import Reports
from paceline.torch._trainer.training import Training
from paceline.torch._trainer.trials import Trials
from paceline.torch._trainer.verification import Verification
from paceline.torch._trainer.works import Works

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from paceline.torch._trainer.asks import Asked


class DataParallel(Trainer, AsModule):
    """Trains `module` on several devices of this machine, with exactly the gradient of one. In place of `torch.nn.DataParallel`, too.

    Every call of `step` splits one batch over the devices in proportion to their measured speeds, runs forward and backward on
    persistent replicas that share the parameters, and adds the gradient of the *whole* batch to the parameters' ``.grad``.
    The module stays the user's: its parameters are the trained ones, and its ``state_dict`` is the same as on one device.

    It can also be called, as `torch.nn.DataParallel`: ``loss = criterion(model(x), y); loss.backward()``. See `forward`; `explain` says what `step` would
    gain. It is an `nn.Module` that stands for `module`: parameters, buffers, modules, the keys of ``state_dict``, mode and hooks are those of `module`, also
    where it is a part of another module. ``load_state_dict`` also takes keys that begin with ``module.``. ``copy.deepcopy`` and pickling
    give the plain module. ``to``, ``cuda``, ``half`` and the like may not change device or type, unless `devices` is ``"auto"`` and nothing has run yet.

    Parameters
    ----------
    module
        The module to train. With two or more devices it is copied once per device. The copies have buffers of their own, and share the
        parameters within a memory. Before each call the copies take over what you changed on the module: parameters, buffers, attributes,
        hooks, training mode and ``requires_grad``. What a forward writes to attributes of its own module stays with that copy until you
        change it on yours. After each call your module gets the values of the copy that ran most items: simple values, and tensors without
        a graph. Parameters and modules in plain lists, dictionaries or objects get their gradients, too, but `optimizer` and ``state_dict``
        only know registered ones. With GPUs among the devices the module has to be on the first GPU.
    devices
        ``"auto"`` (every GPU, without GPUs every host device), ``"host"`` (every host device), names such as ``["host:0", "host:1"]`` or
        ``["cuda:0", "cuda:1"]``, what `paceline.partition` returns, GPUs as ``torch.device``, or a `paceline.DeviceGroup`, which then stays
        open on `close`. Numbers, as in ``[0, 1]``, are GPUs; without GPUs host devices. With ``"auto"`` and numbers a module in host memory is
        brought to the first GPU, which ``"auto"`` warns of. If a launcher has started several processes on this machine (``LOCAL_WORLD_SIZE``),
        ``"auto"`` is the part of the GPUs, or of the cores, of this one (``LOCAL_RANK``). None: ``"auto"``.
    output_device
        Where the outputs of a call go. None: to the device of the module. A number is a GPU; without GPUs the host.
    dim
        Which dimension of tensors is the item, in calls. `step` and its like have ``batch_dim=``.
    device_ids
        Another name for `devices`.
    balance
        ``"auto"``: shares follow the measured speeds, and a device that is done early takes over work. If steps on host devices take less
        than 20 ms, a few of them (after 32 steps, then ever more seldom) run on one device alone. From these, `explain` and `what_if` know
        whether one device would be faster. ``"even"``: equal shares. A list with one number per device: fixed ratios. The last two never
        move work.
    micro_batch
        Items of one forward and backward. None: one large planned micro-batch per device, then small corrections where they pay. On host
        devices (also on a single one) `step` then also measures in some steps whether smaller micro-batches are faster, since they may fit
        a cache, and uses them if so. It does not if the forward writes buffers, as batch and spectral normalisation do, if fixed shares
        draw random numbers, or with `torch.compile`, ``hold_back=False``, `granularity` or costs. If the loss couples items, set
        `micro_batch` to the whole batch on one device, so that the loss stays as it is.
    reduction
        What ``loss_fn`` returns for its slice: the ``"mean"`` over its items (or, with `weight`, over their weight), or their ``"sum"``.
        **The objective is the mean over the batch either way.** This argument only has to say what is true; it does not change gradients.
    replicate
        ``replicate(module)`` returns a new module of the same structure. For modules that ``copy.deepcopy`` cannot copy.
    timeout
        Seconds that anything enqueued on a GPU may take. What takes longer counts as a hang.
    transport
        What brings the parameters to several GPUs, and the sums of their gradients to the first GPU. ``"copies"``: each bucket of gradients is
        pulled and summed in slices while the GPUs still compute; from three GPUs on the others sum, and each of them pulls the parameters from
        the one before it. ``"auto"``: the same, but the links are measured first, once in a process and in at most a second, and if each GPU
        gets all parameters sooner from the first one, it does so. ``"nccl"``: all gradients after
        the devices' last work, because NCCL's kernels wait for each other, and user code on a worker may hold one up. `explain` says which
        one is in use, and how fast the links are. NCCL has a minute for a collective (half of `timeout` if that is less).
    reduce_dtype
        ``torch.bfloat16`` or ``torch.float16``: float32 gradients go from GPU to GPU in this type, which halves what links carry. Each device's
        gradient is rounded to it once, added in float32 in the order of the devices, and the sum is rounded once; ``.grad`` is float32 as ever.
        The result does not depend on which GPU sums what. Gradients of other types stay as they are. In float16, values beyond 65504 become
        infinite, which a `GradScaler` takes for an overflow, and without one those below 3e-8 become zero: a gradient is divided by the weight of
        the batch before it is rounded. Nothing changes on host devices, on a single GPU, or on its parts. Host
        devices beside GPUs send float32, which is rounded like the others. Not with ``transport="nccl"``. None: gradients travel as they are.
    memory
        How much memory each device has for everything: parameters, buffers, gradients and a micro-batch. Bytes, or a fraction of the device's
        memory, which devices that share a memory divide evenly, as they do its parameters. A dictionary limits only some devices, by name. Two
        sizes are measured, and then larger claims run in pieces that fit. With `cost` of `step` a size is the cost of the items when all are
        padded to the longest. An optimizer's state is not counted. Default: no limit but the memory itself.
    hold_back
        Whether each device holds back a part of its share if times vary. Devices that are done early then take ever smaller micro-batches
        from these parts within the step. None: on host devices, unless the forward writes buffers, as batch and spectral normalisation in
        training do; then each device runs one micro-batch. On GPUs you have to ask for it, since a new size may need compilation,
        a new capture, or the search for an algorithm. `granularity` bounds the number of sizes. With `micro_batch`, or costs: devices that
        are done early take over micro-batches that others have not begun; on two GPUs or more only if this is True. A GPU that may still get
        work does not know its last micro-batch, so its gradients are summed after the step's last work. Needs ``balance="auto"``.
    granularity
        Shares, and what devices take over from each other, are multiples of so many items. So no more than ``batch / granularity`` sizes of
        micro-batches ever run (and one for the rest of the batch). For modules that compile or tune for each size. With 1 any size up to
        the batch may run. Larger numbers make shares coarser. None: 1 on host devices. With GPUs and ``balance="auto"`` about 1/32 of an even
        share, rounded to a multiple of 8 or a power of two; by this steps take 0.5 % longer on average, and at most 3 %.
        ``report()["sizes"]`` has the sizes that ran.
    watchdog
        Seconds that a call may take (a step, a run of `batch`, a prediction). If it takes longer, a file says what each device runs, whether
        its worker is inside user code, the plan, and where all threads of Python are. A `UserWarning` names the file, and so does the error
        that may end the call. The call goes on. None: no watchdog. Native code that hangs with Python's lock held stops the watchdog, too.
    watchdog_path
        The folder for these files. Default: the present one.
    verify_every
        Every so many steps `step` and `loss` first do what `verify_replicas` does, with their own batch, and raise an `Error` if devices
        differ. Nothing is committed then. None: never.
    group
        The processes that train the module together, such as ``torch.distributed.group.WORLD``: one for each GPU or one for each machine. A
        process is one rank and owns its `devices`. Each rank passes its own part of the batch, of any size, or None if it has none left;
        `batch_sampler` makes parts by how fast ranks are. The objective and its gradients are those of the whole batch, on every rank. All ranks
        call `step`, `loss` and `batch` in the same order. At the start all ranks get the parameters and buffers of rank 0. ``"auto"``: all
        processes that a launcher has started together (``torchrun``, ``paceline run``), or that are in a process group; the group is made if
        the script has not made it. ``"alone"``: no other processes.
    reducer
        In place of `group`, for ranks that come and go: an object with ``all_reduce(tensor)``, which sums a tensor over the ranks in place, and
        ``should_commit()``, which says after all sums of a step whether they were complete. If it says no, the step raises `Cancelled`, and
        has changed nothing. torchft's manager has both under other names. The parameters of all ranks have to be equal at the start.
    batch_norm
        What batch normalisation in training normalises over. ``"apart"``: each micro-batch by itself. ``"synchronised"``: the whole batch, as
        on one device. Each device then runs its share as one micro-batch, all at the same time, and they meet in each BatchNorm module,
        forward and backward. Gradients and running statistics are those of the whole batch. With `group` the devices of all ranks meet: running
        statistics are equal on all ranks, each rank needs items in every batch, and steps are not proved. Devices meet in the host's memory, so a
        GPU waits in every such module. Not together with `reducer`, `micro_batch`, `memory`, ``hold_back=True``, ``cost=`` and ``torch.compile``.
        Gradients of gradients are refused.
    graphs
        Whether `step` and `loss` replay CUDA graphs, so that a micro-batch is one launch and no Python of `loss_fn`. For GPUs only. Each GPU runs
        two micro-batches of a size as usual, captures forward and backward of the third, and replays them from then on. At most 16 graphs
        are kept for each GPU; further sizes run as usual, and so do `batch` and `predict`. Another `loss_fn` (a function made again around the
        same objects is the same), other modes or autocast, another default device, another structure of the batch: each has a graph of its own. If parameters or
        buffers get other memory, or attributes change, everything is captured again. What Python computes while a graph is captured stays as
        it was: `loss_fn` may not depend on values that change elsewhere, and what it returns beside the loss are tensors. Refused at the capture, with
        the line: waits for the GPU such as ``item()``, or an ``if`` on a tensor. Also: hooks on modules, attributes that a forward sets, losses
        that reach tensors outside of the module, a `weight` that is a mapping, dropout on parts of one GPU, and ``batch_norm="synchronised"``. A
        single GPU works on a copy of the module, too.
    buffers
        What becomes of buffers that each device's forward writes, by their names in ``named_buffers()``. ``"sum"``: the devices' changes are added, as
        for counts. ``"mean"``: they are averaged by items, as for averages that move. ``"home"``: the first device's. All others come from the
        device that ran most items.
    prove
        Whether `step`, `loss` and `predict` prove that they give the result of one device. The first step of each kind of work (a function and what it closes
        over, the structure of the batch, the module's structure and mode) runs whole on the module itself, as in plain PyTorch, and that is its
        result. Then the same batch runs split over the devices from the same state, and is thrown away after it was compared: loss, extras,
        gradients, buffers, attributes, and parameters that the forward writes. So do steps 1,000, 10,000 and so on of each kind. ``"warn"``: a
        `ProofWarning` says what differs, and what cures it if that is found. ``"raise"``: an `Error`, and all is as before the step (attributes
        alone are warned of). Of a `predict` the outputs and the state are compared. While proofs are on, replicas use
        the large tensors, arrays and vocabularies that the module holds, and each gets a copy of what a forward writes. False: nothing
        is proved, and all is copied. `explain` lists the proofs. ``paceline.torch.proving()`` is true in runs that are thrown away. None: what the environment
        variable ``PACELINE_PROVE`` says (``warn``, ``raise`` or ``off``), else ``"warn"``.
    observe
        ``"socket"``: ``paceline top`` shows the trainer, by a socket file that only programs of this user can read from, until `close`. None: nobody can look.

    Notes
    -----
    *Exact* means: for an objective that is a weighted sum over items, the gradient equals the gradient of one device up to the order of
    floating-point sums. Losses that couple items (contrastive losses, BatchNorm in training) are no such sum.

    Dropout stays valid but draws other masks for another split. On host devices the same seed and the same split give the same numbers, so
    runs with ``balance="even"`` or `replay_claims` can be repeated. An `UnseededDrawsWarning` names what cannot be seeded. If a step draws
    after steps that did not, it runs twice, and so does the Python code of `loss_fn`. Forward-mode differentiation goes through
    ``torch.func``.

    While a trainer on host devices is open, PyTorch runs operators on one thread in the thread that has opened it, and in other threads during
    their calls of the trainer. `close` restores the number of threads. If another thread closes the trainer, the next call restores it.

    On GPUs a step is ordered on the caller's current stream of the module's GPU, like an operator, and waits for nothing. The caller may be
    two steps ahead of the devices. If memory runs out, the step runs again in smaller pieces.

    Examples
    --------
    >>> with DataParallel(model) as trainer:                                     # doctest: +SKIP
    ...     optimizer = trainer.optimizer(torch.optim.AdamW, lr=3e-4)
    ...     for batch in loader:
    ...         loss = trainer.step(lambda module, b: loss_fn(module(b[0]), b[1]), batch)
    ...         optimizer.step(); optimizer.zero_grad()
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Devices | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        *,
        device_ids: Devices | None = None,
        balance: Balance = "auto",
        micro_batch: int | None = None,
        reduction: Reduction = "mean",
        replicate: Replicate | None = None,
        timeout: float = 600.0,
        transport: Transport = "auto",
        reduce_dtype: torch.dtype | None = None,
        memory: Memory | None = None,
        hold_back: bool | None = None,
        granularity: int | None = None,
        watchdog: float | None = None,
        watchdog_path: str | os.PathLike[str] | None = None,
        verify_every: int | None = None,
        group: Group = "auto",
        reducer: Reducer | None = None,
        batch_norm: BatchNorm = "apart",
        graphs: bool = False,
        prove: Prove | None = None,
        buffers: Mapping[str, BufferRule] | None = None,
        observe: Literal["socket"] | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "module", "__class__")}
        check_module("DataParallel", module)
        if devices is not None and device_ids is not None:
            raise InvalidArgument(
                "DataParallel: devices= and device_ids= are two names for the same. Give one of them."
            )
        named: Any = numbered(next((one for one in (devices, device_ids) if one is not None), "auto"), module)
        check_devices("DataParallel", named)
        require(is_whole(dim) and dim >= 0, "DataParallel", "dim", dim, "it must be an integer of at least 0")
        check_observe("DataParallel", observe)
        self._dim, self._output_device, self._arguments = dim, output_of(output_device), arguments
        require_one_of("DataParallel", "reduction", reduction, *get_args(Reduction))
        for name, value in (("micro_batch", micro_batch), ("granularity", granularity)):
            if value is not None:
                check_count("DataParallel", name, value, ", or None to have it chosen")
        require_one_of("DataParallel", "graphs", graphs, True, False)
        # Also if there is nothing to carry.
        require_one_of("DataParallel", "transport", transport, *get_args(Transport))
        check_reduce_dtype(reduce_dtype, transport)
        check_timeout("DataParallel", timeout)
        policy, _ = policy_of(balance)
        proves = prove_of(prove)
        rules = None if buffers is None else BufferRules(buffers, module)
        check_hold_back(hold_back, policy)
        if verify_every is not None:
            check_count("DataParallel", "verify_every", verify_every)
        folder = watchdog_folder(watchdog, watchdog_path)
        local = group_of("DataParallel", named, module)
        try:
            _, weights = policy_of(balance, count=len(local))
            places = places_of(local, module, timeout, transport, reduce_dtype)
            if graphs:
                check_graphs(places.names, places.on_gpu)
            check_batch_norm(batch_norm, micro_batch=micro_batch, memory=memory, hold_back=hold_back, graphs=graphs)
            synchronised = batch_norm == "synchronised"
            ranks = ranks_of(group, reducer, module, places.home)
            if ranks is not None and synchronised:
                check_ranks_meet(ranks, module, prove)
                proves = None
            options: dict[str, Any] = {
                "balance": policy,
                "weights": weights,
                "micro_batch": micro_batch or 0,
                "granularity": int(not any(places.on_gpu)) if granularity is None else granularity,
                "corrections": hold_back,
            }
            free = (
                micro_batch is None and granularity in (None, 1) and hold_back is not False and not any(places.on_gpu)
            )
            works = Works(local, places, micro_batch_limits(memory, local, module), options, free=free)
            if free and policy == "auto" and len(local) > 1 and ranks is None:
                works.steps.alone = AloneTrials()
            replicas = Replicas(module, places, replicate, common=Common() if proves and len(places) > 1 else None)
            features = every_feature(replicas, synchronised=SynchronisedNorms(ranks) if synchronised else None)
            execution = Execution(module, places, replicas, Shares(places, replicas, features, rules))
            if graphs:
                replicas.share()  # so that gradients in static memory are not the user's own
                execution.graphs = Graphs(places, execution.flat)
            if watchdog is not None and folder is not None:
                execution.features.add(Watchdog(watchdog, folder, places))
            if ranks is not None:
                execution.join(ranks, synchronised=synchronised)
        except BaseException:
            local.close()
            raise
        self._assemble(
            module,
            local,
            works=works,
            execution=execution,
            reduction=reduction,
            verify_every=verify_every,
            prove=proves,
        )
        self._reports.passes = self._passes = Passes(Core(works, execution, self._lifetime), self._proofs)
        show(self, observe)

    def _is_unused(self) -> bool:
        auto = self._arguments["devices"] in (None, "auto") and self._arguments["device_ids"] in (None, "auto")
        touched = self._touched or self._lifetime.entered or type(self) is not DataParallel
        return auto and self._lifetime.is_open and not touched and self._works.unused

    batch = carried_out_by("_training", Training.batch)
    batch_sampler = carried_out_by("_data", Data.batch_sampler)
    rank_ledger = carried_out_by("_data", Data.rank_ledger)
    replay_claims = carried_out_by("_training", Training.replay_claims)
    verify_replicas = carried_out_by("_verification", Verification.verify_replicas)
    find_batch_size = carried_out_by("_trials", Trials.find_batch_size)
    write_ledger = carried_out_by("_reports", Reports.write_ledger)
    _what_if = carried_out_by("_reports", Reports.what_if)

    @overload
    def what_if(self, *, prices: None = None, **asked: Unpack[Asked]) -> WhatIfAnswer: ...
    @overload
    def what_if(self, *, prices: Mapping[str, float], **asked: Unpack[Asked]) -> Worth: ...
    @functools.wraps(_what_if)
    def what_if(self, **asked: Any) -> Any:
        return self._what_if(**asked)
