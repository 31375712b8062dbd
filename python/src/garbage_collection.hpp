// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace paceline::python {

// Python's garbage collector while workers run user code. All with the interpreter held.
//
// torch.Generator.get_state makes a Python object while it holds the generator's mutex. Up to Python 3.11 that may
// collect garbage then and there; a tensor that is freed lets go of the interpreter, and the next worker to ask the
// same generator waits for the mutex without letting go of it: a deadlock. A step asks so, and activation checkpointing
// does. So nothing is collected while a worker is inside, but where none of them holds anything. Later Pythons collect
// between bytecodes only, and there these do nothing.

/// A worker enters user code. Of several that are inside the first one counts.
void pause_collection();

/// It has left, normally. The last one puts the collector back to how the first one found it.
void resume_collection();

/// Collects what Python would have collected since the last time, if it is paused: between two pieces of work.
void collect_if_due();

}  // namespace paceline::python
