// SPDX-License-Identifier: Apache-2.0
//
// Which NCCL is found, and one that is missing, old or incomplete.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include <paceline/comm/nccl_info.hpp>
#include <paceline/error.hpp>

#include "nccl_library.hpp"
#include "nccl_machine.hpp"

namespace paceline {
namespace {

/// Runs in a process of its own, since one that has found an NCCL keeps it. The path of what was found, or why nothing.
void expect_found(const std::string& expected, const std::function<void()>& prepare) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        unsetenv("PACELINE_NCCL_LIBRARY");
        prepare();
        const NcclInfo info = nccl_info();
        std::fprintf(stderr, "found %s%s", info.path.c_str(), info.why_none.c_str());
        std::_Exit(0);
      },
      ::testing::ExitedWithCode(0), expected);
}

TEST(NcclLibrary, IsTheOneThatTheProcessHasBeforeAnyOther) {
  expect_found("found .*/libnccl.so.2", [] {
    ASSERT_NE(dlopen(FAKE_NCCL_RESIDENT_PATH, RTLD_NOW | RTLD_LOCAL), nullptr);
    setenv("PACELINE_NCCL_LIBRARY", FAKE_NCCL_PATH, 1);
    set_nccl_path(FAKE_NCCL_PATH);
  });
}

TEST(NcclLibrary, IsTheOneThatTheEnvironmentNamesBeforeThatOfAPackage) {
  expect_found("found .*/libfake_nccl.so", [] {
    setenv("PACELINE_NCCL_LIBRARY", FAKE_NCCL_PATH, 1);
    set_nccl_path(FAKE_NCCL_RESIDENT_PATH);
  });
  expect_found("found NCCL: /nowhere/libnccl.so cannot be loaded", [] {
    setenv("PACELINE_NCCL_LIBRARY", "/nowhere/libnccl.so", 1);
    set_nccl_path(FAKE_NCCL_RESIDENT_PATH);
  });
}

TEST(NcclLibrary, IsThatOfAPackageBeforeTheSystems) {
  expect_found("found .*/libfake_nccl.so", [] { set_nccl_path(FAKE_NCCL_PATH); });
}

TEST(NcclLibrary, TellsItsVersionAndItsFile) {
  boot(1, 1);
  const NcclInfo info = nccl_info();
  EXPECT_EQ(info.version, "2.30.7");
  EXPECT_EQ(info.path, FAKE_NCCL_PATH);
  EXPECT_EQ(info.why_none, "");
}

TEST(NcclLibrary, RefusesAnOldOneAndSaysWhich) {
  fake::Nccl& nccl = boot(1, 1);
  nccl.set_version(21704);
  const auto error = thrown_by<Unavailable>([] { static_cast<void>(nccl::open_library(FAKE_NCCL_PATH)); });
  EXPECT_TRUE(says(error, FAKE_NCCL_PATH " is version 2.17.4, and 2.18.0 or newer")) << error.what();
  nccl.set_version(21800);
  EXPECT_EQ(nccl::open_library(FAKE_NCCL_PATH).version, 21800);
}

TEST(NcclLibrary, NamesAMissingFunction) {
  // The version is asked first; the incomplete one has its own.
  const auto error = thrown_by<Unavailable>([] { static_cast<void>(nccl::open_library(FAKE_NCCL_INCOMPLETE_PATH)); });
  EXPECT_TRUE(says(error, FAKE_NCCL_INCOMPLETE_PATH " has no function ncclCommAbort")) << error.what();
}

TEST(NcclLibrary, SaysThatAFileIsNone) {
  const auto error = thrown_by<Unavailable>([] { static_cast<void>(nccl::open_library("/nowhere/libnccl.so.2")); });
  EXPECT_TRUE(says(error, "/nowhere/libnccl.so.2 cannot be loaded")) << error.what();
  EXPECT_TRUE(says(error, "pip install")) << error.what();
}

}  // namespace
}  // namespace paceline
