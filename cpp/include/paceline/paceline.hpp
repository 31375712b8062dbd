// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a program that trains with paceline needs. cpp/README.md lists what is left out.
#include <paceline/balance/balance.hpp>
#include <paceline/balance/balancer.hpp>
#include <paceline/comm/communicator.hpp>
#include <paceline/comm/nccl_info.hpp>
#include <paceline/device_id.hpp>
#include <paceline/engine/batch_plan.hpp>
#include <paceline/engine/data_parallel.hpp>
#include <paceline/engine/lanes.hpp>
#include <paceline/engine/pipeline.hpp>
#include <paceline/engine/pipeline_step.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/engine/step_loop.hpp>
#include <paceline/error.hpp>
#include <paceline/observe/event_ring.hpp>
#include <paceline/observe/history.hpp>
#include <paceline/observe/metrics.hpp>
#include <paceline/plan/corrections.hpp>
#include <paceline/plan/cost_model.hpp>
#include <paceline/plan/hold_back.hpp>
#include <paceline/plan/item_arrangement.hpp>
#include <paceline/plan/item_cost.hpp>
#include <paceline/plan/item_packing.hpp>
#include <paceline/plan/items.hpp>
#include <paceline/plan/padded_items.hpp>
#include <paceline/plan/pipeline_time.hpp>
#include <paceline/plan/schedule.hpp>
#include <paceline/plan/split.hpp>
#include <paceline/plan/stages.hpp>
#include <paceline/runtime/backend.hpp>
#include <paceline/runtime/device.hpp>
#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/device_health.hpp>
#include <paceline/runtime/gpu_facts.hpp>
#include <paceline/runtime/partition.hpp>
