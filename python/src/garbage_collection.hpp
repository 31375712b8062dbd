// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace paceline::python {

// Pauses Python's garbage collector while workers run user code. Call these functions with the GIL held.
//
// This avoids a deadlock up to Python 3.11. torch.Generator.get_state creates a Python object while it holds the
// generator's mutex, which may start a collection. Freeing a tensor there releases the GIL. The next worker that asks
// the same generator then waits for the mutex while it holds the GIL. Steps and activation checkpointing make such
// calls. So collections run only between pieces of work. Later Pythons collect between bytecodes only, and there these
// functions do nothing.

/// A worker enters user code. The first one inside pauses the collector.
void pause_collection();

/// A worker leaves user code. The last one restores the collector's earlier state.
void resume_collection();

/// Runs a collection that is due, if the collector is paused. Call it between two pieces of work.
void collect_if_due();

}  // namespace paceline::python
