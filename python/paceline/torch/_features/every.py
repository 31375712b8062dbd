"""The features of a trainer, in the order in which they act."""

from __future__ import annotations

from paceline.torch._features.buffers import WrittenBuffers
from paceline.torch._features.common_data import CommonData
from paceline.torch._features.compiled import ArrivingParameters, CompiledCode
from paceline.torch._features.draws import Draws
from paceline.torch._features.forward_ad import ForwardAD
from paceline.torch._features.idle_items import IdleItems
from paceline.torch._features.memory import SmallerPieces
from paceline.torch._features.norms import NormsApart
from paceline.torch._features.profiler import Profiler
from paceline.torch._features.synchronised import SynchronisedNorms
from paceline.torch._features.whole_gpu import WholeGpuKernels
from paceline.torch._replicas.batch_norm import CURE
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.feature import Feature


def every_feature(
    replicas: Replicas,
    *,
    synchronised: SynchronisedNorms | None = None,
    cure_of_norms: str = CURE,
    mends: tuple[Feature, ...] = (),
) -> list[Feature]:
    """All that a trainer of these replicas has. `mends`: what else may follow from an error, before memory is blamed."""
    return [
        Profiler(),
        WholeGpuKernels(),
        CommonData(),
        ForwardAD(),
        Draws(),
        CompiledCode(),
        *([synchronised] if synchronised is not None else []),
        *mends,
        SmallerPieces(),
        NormsApart(replicas, cure=cure_of_norms, synchronised=synchronised is not None),
        WrittenBuffers(),
        IdleItems(),
        ArrivingParameters(),
    ]
