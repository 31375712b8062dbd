// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include <paceline/export.hpp>
#include <paceline/plan/pool_types.hpp>

/// The ledger of a pool (PoolState::write_to): JSON lines, a header and one line for each event, with what was decided.
///
///   {"paceline_pool_ledger": 1, "options": {"placement": "auto", ...}}
///   {"add_kind": {"name": "score", "sizes": [1, 2, 4], ...}}
///   {"add_need": {"accepted": [true, false]}}
///   {"add_tenant": {"name": "lab-a", "weight": 2}}
///   {"at": 0, "add_device": {"name": "host:0", "device_class": "", "labels": ["host"], ..., "accepted": [true]}}
///   {"at": 0.5, "submit": {"kind": 0, "deadline_seconds": 0.1}, "job": 4194304, "decided": {...}}
///   {"at": 0.6, "finish": {"run": 1048576, "result": "completed", "seconds": 0.1}, "decided": {...}}
///   {"at": 0.6, "measure": {"device": 0, "kind": 0, "model": [0, 0.1], "samples": 1}}
///
/// and "forget", "unload", "withdraw", "cancel", "retire", "restore", "lose", "loaded" and "tick", all with the
/// arguments of the functions of PoolState. What has its default is left out. "accepted" says which devices, or for a
/// device which needs, go together. With the user's own placement "chosen" lists what it answered. Doubles read back
/// bit for bit; infinity and NaN are null.
///
/// `paceline.sim.replay_pool` (Python) and `paceline replay` run a fresh PoolState through these events and compare
/// every decision.
namespace paceline::plan {

/// Raised when an older reader would misread a newer ledger, or the same events would lead to other decisions.
constexpr std::int64_t kPoolLedgerVersion = 1;

/// What was decided, as a ledger has it; empty if it is nothing. "ends": [job, outcome, reason], with the job that it
/// depended on; "starts": as PoolStart; "declines": [device, kind, reason, waiting, threshold]; "wake_seconds".
[[nodiscard]] PACELINE_API std::string ledger_json(const PoolDecisions& decisions);

}  // namespace paceline::plan
