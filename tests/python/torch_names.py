"""The private names of PyTorch that the package uses, all of them. PyTorch may change them in any version.

Each is there in every version from 2.9 on. `test_torch_names.py` compares this list with the package and with the PyTorch that is installed,
so that another version fails there, and by name.
"""

from __future__ import annotations

# Written out below ``torch``.
NAMES = [
    "torch._C._DisableTorchDispatch",
    "torch._C._are_functorch_transforms_active",
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    "torch._C._autograd._profiler_type",
    "torch._C._autograd._push_saved_tensors_default_hooks",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._cuda_clearCublasWorkspaces",
    "torch._C._cuda_endAllocateToPool",
    "torch._C._current_graph_task_id",
    "torch._C._enter_dual_level",
    "torch._C._exit_dual_level",
    "torch._C._functorch.maybe_current_level",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._len_torch_function_stack",
    "torch._C._set_grad_enabled",
    "torch._C._is_key_in_tls",
    "torch._C._profiler.ActiveProfilerType.NVTX",
    "torch._C._stash_obj_in_tls",
    "torch._C._storage_Use_Count",
    "torch._C._swap_tensor_impl",
    "torch._C.DisableTorchFunction",
    "torch._foreach_add_",
    "torch._foreach_copy_",
    "torch._foreach_mul_",
    "torch._foreach_zero_",
    "torch._functorch.eager_transforms",
    "torch._safe_softmax",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.autograd.forward_ad._current_level",
    "torch.autograd.graph._engine_run_backward",
    "torch.autograd.profiler._is_profiler_enabled",
    "torch.fx._symbolic_trace",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.utils.parametrize._cache",
    "torch.nn.utils.parametrize._cache_enabled",
    "torch.overrides._get_current_function_mode_stack",
    "torch.overrides._pop_mode",
    "torch.overrides._push_mode",
    "torch.utils._device.DeviceContext",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "torch.utils._python_dispatch._pop_mode",
    "torch.utils._python_dispatch._push_mode",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_unflatten",
]

# Not in builds of PyTorch without CUDA.
NEED_CUDA = {"torch._C._cuda_clearCublasWorkspaces", "torch._C._cuda_endAllocateToPool"}

# Attributes of PyTorch's objects, by the kind of object.
ATTRIBUTES = {
    "parameter": ("_version", "_backward_hooks", "_post_accumulate_grad_hooks"),
    "module": (
        *("_parameters", "_buffers", "_modules", "_compiled_call_impl", "_call_impl", "_is_full_backward_hook"),
        *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs"),
        *("_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks"),
    ),
    "storage": ("_cdata",),
    "tracing": ("_orig_module_call", "_orig_module_getattr", "_is_fx_tracing_flag"),
    "operator": ("_schema",),
    "jagged": ("_ragged_idx",),
    "compiled": ("_torchdynamo_orig_callable",),
    "ddp": ("_sync_buffers",),
    "fsdp": ("_get_fsdp_state",),
    "fsdp state": ("_fsdp_param_group", "_fsdp_param_groups"),
    "process group": ("_get_backend",),
    "backend options": ("_timeout",),
    "fsdp group": ("unshard", "wait_for_unshard", "post_backward"),
}

# Private names that the package uses of others: Python, OpenTelemetry, torchmetrics, transformers.
OTHERS = {
    *(
        "_asdict",
        "_replace",
        "_getframe",
        "_current_frames",
        "_is_gil_enabled",
        "_slotnames",
        "_loss_shifts_labels",
        "_real_meter",
        "_update_count",
        "_waiters",
    ),
    *("_global", "_celsius", "_hz", "_mhz", "_watts", "_wait_seconds"),  # ends of names
}
