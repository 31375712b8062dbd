// SPDX-License-Identifier: Apache-2.0
//
// Parts of one GPU that stand for GPUs in tests: what else they are.
#include <gtest/gtest.h>

#include <string>

#include <paceline/comm/communicator.hpp>
#include <paceline/error.hpp>

#include "fake_cuda.hpp"
#include "gpu_training.hpp"
#include "helpers.hpp"

namespace paceline {
namespace {

TEST(PartsAsGpus, APartThatStandsForAGpuComputesOnItsOwnSms) {
  boot(0, 1);
  const Box box{"", 1, {"cuda:0/1"}, {0.75, 0.25}, Transport::copies, true};
  {
    Trainer trainer(group_of(box), {.parameter_count = kWidth});
    trainer.step(kBatch, [](const MicroBatch& mb, Trainer::Replica& replica) {
      EXPECT_EQ(fake::sms_of(replica.stream).size(), 32U);
      return body(mb, replica);
    });
    Reference reference;
    reference.step();
    update(trainer);
    EXPECT_NEAR(fetched(trainer)[0], reference.parameters[0], 1e-12);
  }
  make_whole(box);
}

TEST(PartsAsGpus, NcclIsRefusedForPartsOfOneGpu) {
  boot(0, 1);
  const Box box{"", 1, {"cuda:0/0", "cuda:0/1"}, {0.5, 0.5}, Transport::nccl, true};
  const auto error = thrown_by<Unavailable>([&] {
    Trainer trainer(group_of(box), {.parameter_count = kWidth, .collectives = {.transport = Transport::nccl}});
  });
  EXPECT_TRUE(says(error, "cuda:0/0 and cuda:0/1 are parts of one GPU")) << error.what();
  EXPECT_TRUE(Communicator(group_of(box)).description().starts_with("copies")) << "unless NCCL is asked for";
  make_whole(box);
}

}  // namespace
}  // namespace paceline
