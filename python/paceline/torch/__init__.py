"""PyTorch on all devices of one machine: `DataParallel`, also in place of `torch.nn.DataParallel`, `Pipeline` for modules larger than a device, `Pool` for independent jobs; for those who stay on DDP or FSDP, `BalancedRanks`.

Needs PyTorch, which this package does not install by itself: ``pip install "paceline[torch]"``.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("paceline.torch needs PyTorch, which is not installed: pip install 'paceline[torch]'") from error

from paceline.torch._batch.global_sampler import GlobalBatchSampler
from paceline.torch._batch.splits import Splitter
from paceline.torch._check.agreement import ReplicaReport
from paceline.torch._check.proof import proving
from paceline.torch._check.report import Cause, CheckReport, SplitResult
from paceline.torch._devices.run_draws import UnseededDrawsWarning
from paceline.torch._devices.whole_gpu_kernels import WholeGpuKernelsWarning
from paceline.torch._pipeline.layout import Candidate, Layout, layout
from paceline.torch._pipeline.pipeline import Pipeline
from paceline.torch._pipeline.replicas_source import PipelineReplicas
from paceline.torch._pool.autoscale import Autoscale
from paceline.torch._pool.batcher import Batcher
from paceline.torch._pool.future import PoolFuture
from paceline.torch._pool.pool import Pool
from paceline.torch._pool.routing import Version
from paceline.torch._pool.tenants import Tenant
from paceline.torch._ranks.balanced_ranks import BalancedRanks
from paceline.torch._run.reducer import Reducer
from paceline.torch._save.background import PendingSave
from paceline.torch._trainer.alarms import Alarm
from paceline.torch._trainer.batch_size import BatchSizeSearch
from paceline.torch._trainer.figures import Report
from paceline.torch._trainer.global_batch import GlobalBatch, MicroBatch
from paceline.torch._trainer.proofs import ProofWarning
from paceline.torch._trainer.trainer import DataParallel

__all__ = [
    "Alarm",
    "Autoscale",
    "BalancedRanks",
    "BatchSizeSearch",
    "Batcher",
    "Candidate",
    "Cause",
    "CheckReport",
    "DataParallel",
    "GlobalBatch",
    "GlobalBatchSampler",
    "Layout",
    "MicroBatch",
    "PendingSave",
    "Pipeline",
    "PipelineReplicas",
    "Pool",
    "PoolFuture",
    "ProofWarning",
    "Reducer",
    "ReplicaReport",
    "Report",
    "SplitResult",
    "Splitter",
    "Tenant",
    "UnseededDrawsWarning",
    "Version",
    "WholeGpuKernelsWarning",
    "layout",
    "proving",
]
